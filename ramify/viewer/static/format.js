// Formats numbers and texts in the same way as the command line (cli/terminal_text.py).

// 1234567 -> "1,234,567". Not toLocaleString: its first call takes tens of milliseconds.
export function grouped(whole) {
  return String(whole).replace(/\B(?=(\d{3})+$)/g, ",");
}

export function count(number) {
  if (number >= 1e9) return `${trim(number / 1e9)}G`;
  if (number >= 1e6) return `${trim(number / 1e6)}M`;
  if (number >= 1e4) return `${trim(number / 1e3)}k`;
  return grouped(Math.round(number));
}

function trim(number) {
  return String(Number(number.toPrecision(3)));
}

export function dollars(cost) {
  if (cost === null || cost === undefined) return "unknown";
  if (cost === 0 || cost >= 0.1) return `$${cost.toFixed(2)}`;
  return cost >= 0.001 ? `$${trim(Number(cost.toPrecision(2)))}` : `$${cost.toExponential(1)}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return value > 0 ? `${Math.max(1, Math.round(value * 1e6))} µs` : "0 s";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60),
    rest = Math.round(value % 60);
  if (minutes >= 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
}

// Has a stable width, for values that are redrawn often.
export function ticking(value) {
  return value < 60 ? `${value.toFixed(1)} s` : seconds(value);
}

export function moment(unixTime) {
  if (!unixTime) return "–";
  const date = new Date(unixTime * 1000),
    two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return grouped(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6)
    ? value.toExponential(2)
    : String(Number(value.toPrecision(4)));
}

export function oneLine(text, width = 200) {
  const line = text
    .slice(0, 4 * width)
    .replace(/\s+/g, " ")
    .trim();
  return line.length <= width ? line : `${line.slice(0, width - 1)}…`;
}

export function many(n, noun) {
  return `${grouped(n)} ${noun}${n === 1 ? "" : "s"}`;
}

const STOPS = {
  __proto__: null,
  final: ["final", "fine"], // colour is for what is not
  error: ["error", "bad"],
  cancelled: ["cancelled", "warn"],
  no_code: ["no code", "bad"],
  max_turns: ["max turns", "warn"],
  max_tokens: ["max tokens", "warn"],
  max_cost: ["max cost", "warn"],
  deadline: ["deadline", "warn"],
  max_calls: ["max calls", "warn"],
  suspended: ["suspended", "warn"],
};

// [text, color class]
export function stopWords(stop, alive = false) {
  return (
    STOPS[stop] || (stop ? [stop, "warn"] : alive ? ["running", "live"] : ["interrupted", "warn"])
  );
}

export function runAddress(key) {
  return `#/run/${encodeURIComponent(key)}`;
}

const MARKUP =
  /(^|\n)(#{1,6} |\s*[-*+] \S|\s*\d+[.)] \S|> |\|.*\||```)|\*\*\S|`[^`\n]+`|\$[^\s$][^$]*\$|\\\(|\\\[|\]\(/;

// Whether a text is worth reading as Markdown or LaTeX.
export function hasMarkup(text) {
  return MARKUP.test(text);
}
