// Formats numbers and texts in the same way as the command line (ramify/format_quantities.py). No number has
// an exponent, and no unit is ever full: 59.97 seconds are "1 min".

// 1234567 -> "1,234,567". Not toLocaleString: its first call takes tens of milliseconds.
export function grouped(whole) {
  return String(whole).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

export function count(number) {
  if (number >= 9.995e8) return `${plain(number / 1e9)}G`;
  if (number >= 9.995e5) return `${plain(number / 1e6)}M`;
  if (number >= 1e4) return `${plain(number / 1e3)}k`;
  return grouped(Math.round(number));
}

// With significant digits, and never with an exponent: 0.000049, 0.5, 1234
export function plain(number, digits = 3) {
  if (number === 0 || !Number.isFinite(number)) return String(number);
  const places = digits - 1 - Math.floor(Math.log10(Math.abs(number))),
    text = number.toFixed(Math.min(100, Math.max(0, places)));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function dollars(cost) {
  if (cost === null || cost === undefined) return "unknown";
  if (cost === 0 || cost >= 0.0995) return `$${grouped(cost.toFixed(2))}`;
  return cost < 1e-6 ? "under $0.000001" : `$${plain(cost, 2)}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value <= 0) return "0 s";
  if (value < 0.0009995) return `${Math.max(1, Math.round(value * 1e6))} µs`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  const whole = Math.round(value);
  return whole < 3600
    ? inTwo(whole, 60, "min", "s")
    : inTwo(Math.round(whole / 60), 60, "h", "min");
}

// `whole` parts as units of `size` parts, and the rest unless it is 0
function inTwo(whole, size, unit, part) {
  const rest = whole % size;
  return `${grouped(Math.floor(whole / size))} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
}

// Has a stable width, for values that are redrawn often.
export function ticking(value) {
  return value < 59.95 ? `${Math.max(0, value).toFixed(1)} s` : seconds(value);
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
