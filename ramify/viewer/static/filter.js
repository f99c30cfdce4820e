// The filter of the list of runs: words, and fields with a value or a bound.
//
//   cost>0.1 stop:error model:qwen reward:0 "two words"
//
// parseFilter(text) -> { matches(run), problem, group }: `group:origin` groups the rows. A part
// that cannot be read has a problem with its place and its fix, and is left aside.

// Field -> its value for a run. Numbers can be compared.
const FIELDS = {
  __proto__: null, // a field that is named like a method of every object is unknown
  cost: (run) => run.cost,
  tokens: (run) => run.tokens || 0,
  calls: (run) => run.num_calls || 0,
  seconds: (run) => run.seconds || 0,
  depth: (run) => run.depth || 0,
  reward: (run) => run.reward,
  stop: (run) => (run.problem ? "unreadable" : run.stop || (run.alive ? "running" : "interrupted")),
  model: (run) => run.model || "",
  task: (run) => run.task || "",
  question: (run) => run.question || "",
  answer: (run) => run.answer ?? "",
  label: (run) => (run.labels || []).join("\n"),
  note: (run) => run.note || "",
  corrected: (run) => Object.keys(run.corrected || {}).join("\n"),
  id: (run) => run.id,
  file: (run) => run.source || "",
  origin: (run) => originOf(run),
};
const NUMBERS = new Set(["cost", "tokens", "calls", "seconds", "depth", "reward"]);
const COMPARE = {
  ">": (a, b) => a > b,
  "<": (a, b) => a < b,
  ">=": (a, b) => a >= b,
  "<=": (a, b) => a <= b,
  ":": (a, b) => a === b,
  "=": (a, b) => a === b,
};

// Where a run came from: a question of a user, an evaluation, or a rollout of training.
export function originOf(run) {
  return /(^|\/)rollouts\//.test(run.source || "") ? "rollout" : run.task ? "evaluation" : "asked";
}

export function parseFilter(text) {
  const tests = [];
  let problem = null,
    group = null;
  for (const match of text.matchAll(/(-?)(?:([a-z_]+)(>=|<=|[:=<>]))?("[^"]*"?|\S+)/gi)) {
    const [part, not, field, sign, raw] = match,
      value = raw.replace(/^"|"$/g, "").toLowerCase();
    if (field?.toLowerCase() === "group") {
      if (FIELDS[value] && !NUMBERS.has(value)) group = { name: value, of: FIELDS[value] };
      else
        problem ??= {
          start: match.index,
          end: match.index + part.length,
          words: "rows are grouped by origin, task, model, stop, label or question",
          fix: "group:origin",
        };
      continue;
    }
    const test = field
      ? fieldTest(field.toLowerCase(), sign, value)
      : (run) => textOfRun(run).includes(value);
    if (typeof test === "function") tests.push(not ? (run) => !test(run) : test);
    else problem ??= { start: match.index, end: match.index + part.length, ...test };
  }
  const open = /(?:^|\s)([a-z_]+)(>=|<=|[:=<>])(?=\s|$)/i.exec(text);
  if (open && !problem)
    problem = {
      start: open.index,
      end: open.index + open[0].length,
      words: `${open[1]}${open[2]} needs a value`,
      fix: `${open[1]}${open[2]}${NUMBERS.has(open[1]) ? "0" : "error"}`.replace(
        "group:error",
        "group:origin",
      ),
    };
  return { matches: (run) => tests.every((test) => test(run)), problem, group };
}

// A test, or { words, fix } if the part cannot be read.
function fieldTest(field, sign, value) {
  const of = FIELDS[field];
  if (!of) {
    const near = nearest(field, Object.keys(FIELDS));
    return {
      words: `there is no field ${field}: fields are ${Object.keys(FIELDS).join(", ")}`,
      fix: `${near}${sign}${value}`,
    };
  }
  if (NUMBERS.has(field)) {
    const number = Number(value.replace(/^\$|,/g, ""));
    if (!Number.isNaN(number) && value)
      return (run) => typeof of(run) === "number" && COMPARE[sign](of(run), number);
    return {
      words: `${field} is compared with a number, not with ${value}`,
      fix: `${field}${sign}0.1`,
    };
  }
  if (sign !== ":" && sign !== "=")
    return { words: `${field} is text: use ${field}:`, fix: `${field}:${value}` };
  if (value === "none") return (run) => !String(of(run));
  const wanted = value.replaceAll(" ", "_");
  return sign === "="
    ? (run) => String(of(run)).toLowerCase().split("\n").includes(value)
    : (run) =>
        String(of(run))
          .toLowerCase()
          .includes(field === "stop" ? wanted : value);
}

function textOfRun(run) {
  return `${run.question || ""} ${run.model || ""} ${FIELDS.stop(run)} ${FIELDS.stop(run).replaceAll("_", " ")} ${run.id} ${run.task || ""} ${run.source || ""} ${run.answer ?? ""} ${(run.labels || []).join(" ")} ${run.note || ""} ${run.problem || ""}`.toLowerCase();
}

function nearest(word, known) {
  const distance = (a, b) => {
    let row = [...b, 0].map((_, index) => index);
    for (let i = 1; i <= a.length; i++) {
      const next = [i];
      for (let j = 1; j <= b.length; j++)
        next.push(
          Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + Number(a[i - 1] !== b[j - 1])),
        );
      row = next;
    }
    return row[b.length];
  };
  return known.map((each) => [distance(word, each), each]).sort((a, b) => a[0] - b[0])[0][1];
}

// [[field, value, number of runs], …]: what the runs can be narrowed by.
export function facets(runs) {
  const found = [];
  /** @type {[string, (run: any) => any][]} */
  const narrowing = [
    ["origin", originOf],
    ["stop", FIELDS.stop],
    ["model", FIELDS.model],
    ["task", FIELDS.task],
    ["label", (run) => run.labels || []],
  ];
  for (const [field, of] of narrowing) {
    const counts = new Map();
    for (const run of runs)
      for (const value of [of(run)].flat()) counts.set(value, (counts.get(value) || 0) + 1);
    if (counts.size > 1 || (field === "label" && counts.size))
      found.push(
        ...[...counts]
          .sort((a, b) => b[1] - a[1])
          .slice(0, 5)
          .map(([value, count]) => [field, value, count]),
      );
  }
  return found;
}

// The 50th and 90th percentile of numbers, or null for none.
export function percentiles(values) {
  const sorted = values.filter((value) => typeof value === "number").sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  return sorted.length ? [at(0.5), at(0.9)] : null;
}
