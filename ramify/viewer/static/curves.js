// Chooses what is drawn of the metrics of training runs: which charts are pinned, how the others are
// grouped and ordered, which metrics are constant, and the points of each line with its band, over
// steps, time or tokens. Knows nothing of the page.
//
//   metrics of runs ── pinnedOf, chartsOf, constantsOf ──> charts, each with its lines
//   a line of a chart ── pointsOf (one run), bandOfSeeds (several) ──> { x, y, low, high }

// Groups of metrics in this order; metrics without a group come last.
/** @type {[string, RegExp][]} */
const GROUPS = [
  ["reward", /^(reward|child_reward|groups_with_signal|.*\/reward)$/],
  ["pass@k and other evaluations", /pass[@_]|^(validation|test|train)\//],
  ["loss", /(^|_)loss$|^grad_norm$|^lr$/],
  ["policy: KL, entropy, clip fraction", /kl$|entropy|clip/],
  ["off-policy: sampler mismatch, effective sample size, staleness", /mismatch|^ess$|stale/],
  ["per depth and role", /by depth$|role|^calls_per_rollout$|^turns_per_call$|child_/],
  ["signals", /^signal|hint|judge|process|hindsight|teacher/],
  ["speed", /tokens_per_s|_s$|cpu|by batch$|by part$|overhead$/],
  ["rollouts and sizes", /./],
];
const PART = /^(time|time_cpu)\/(\w+)_s$/; // as in time/sampling_s
const LAYER = /^(depth|batch)(\d+)\.(\w+)\/(\w+)$/; // as in depth1.rlm/reward, batch16.decode/steps
const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--live", "--bad"];

// Chart -> [{ name, label }]: one line per chart, but metrics of each depth, and the parts of
// a step's time, share one chart.
export function chartsOf(names) {
  const charts = new Map();
  for (const name of names) {
    const layer = LAYER.exec(name),
      part = PART.exec(name),
      chart = layer
        ? `${layer[4]} by ${layer[1]}`
        : part
          ? `${part[1] === "time" ? "wall" : "CPU"} seconds by part`
          : name,
      label = layer ? `${layer[2]} ${layer[3]}` : part ? part[2].replaceAll("_", " ") : "";
    if (!charts.has(chart)) charts.set(chart, []);
    charts.get(chart).push({ name, label });
  }
  for (const lines of charts.values()) {
    lines.sort((a, b) => (a.name < b.name ? -1 : 1));
    for (const [index, line] of lines.entries()) line.colour = COLOURS[index % COLOURS.length];
  }
  return charts;
}

// What the server has sent so far, with its latest message: everything, or what changed. null if a
// message is missing in between.
export function withChanges(known, { since, names, clock, ...others }) {
  if (since === undefined) return { names, clock, ...others };
  if (since > known.version) return null;
  const extended = (list, first, added) => [...list.slice(0, first), ...added],
    all = { ...known.names };
  for (const [name, [first, steps, values]] of Object.entries(names)) {
    const [oldSteps, oldValues] = all[name] ?? [[], []];
    all[name] = [extended(oldSteps, first, steps), extended(oldValues, first, values)];
  }
  const ticks = ["steps", "seconds", "tokens"].map((name) => [
    name,
    extended(known.clock[name], clock.first, clock[name]),
  ]);
  return { ...known, ...others, names: all, clock: Object.fromEntries(ticks) };
}

/**
 * @typedef {object} Line
 * @property {string} name its metric
 * @property {string} label
 * @property {string} [colour] name of a style property
 * @property {boolean} [isRight] its axis is at the right
 */

/**
 * The points of one line; the band is missing if it is not known.
 * @typedef {{ x: number[], y: (number | null)[], low?: (number | null)[], high?: (number | null)[] }} Points
 */

// The charts that people look at first, each with the metrics in it and their labels. Metrics at the
// right have other units.
/** @type {[string, [string, string, boolean?][]][]} */
const PINNED = [
  ["reward", [["reward", "reward"]]],
  ["validation", [["validation/reward", "reward"]]],
  [
    "entropy and KL",
    [
      ["entropy", "entropy"],
      ["ref_kl", "KL to reference", true],
      ["approx_kl", "KL within step", true],
      ["post_kl", "KL of update", true],
    ],
  ],
  [
    "importance ratio",
    [
      ["clip_fraction", "clipped"],
      ["ess", "effective sample size", true],
    ],
  ],
  [
    "length and truncation",
    [
      ["length_mean", "tokens"],
      ["truncated_rollouts", "truncated rollouts", true],
      ["cut_replies", "truncated replies", true],
    ],
  ],
  ["tokens per second", [["tokens_per_s", "tokens per second"]]],
];
// What a stage without rollouts is judged by.
/** @type {typeof PINNED} */
const PINNED_OF_SFT = [
  ["loss", [["loss", "loss"]]],
  ["gradient norm", [["grad_norm", "norm"]]],
];

// Chart -> its lines, of what was measured.
/** @returns {Map<string, Line[]>} */
export function pinnedOf(names) {
  const known = new Set(names),
    charts = known.has("reward") ? PINNED : [...PINNED_OF_SFT, ...PINNED],
    pinned = new Map();
  for (const [chart, metrics] of charts) {
    const lines = metrics
      .filter(([name]) => known.has(name))
      .map(([name, label, isRight = false], index) => ({
        name,
        label,
        isRight,
        colour: COLOURS[index],
      }));
    if (lines.length && !lines.every((line) => line.isRight)) pinned.set(chart, lines);
  }
  return pinned;
}

// Metric -> its value, for those that never change. curves: of each run, metric -> [steps, values].
export function constantsOf(curves) {
  const constants = new Map(),
    names = new Set(curves.flatMap((each) => Object.keys(each)));
  for (const name of names) {
    const values = curves.flatMap((each) => each[name]?.[1] ?? []);
    if (values.length > 1 && values.every((value) => value === values[0]))
      constants.set(name, values[0]);
  }
  return constants;
}

// Metrics of alarms have no curves: where they were raised is drawn on the others.
const ALARM = /(^|\/)alarm_/;

// The part of the metrics that a stage measured; all of them without a stage. An evaluation before
// its first step belongs to it, too.
export function inStage({ names, stages }, stage) {
  const at = stages.findIndex(([name]) => name === stage),
    from = stages[at]?.[1] ?? -Infinity,
    end = at < 0 ? Infinity : (stages[at + 1]?.[1] ?? Infinity),
    found = {};
  for (const [name, [steps, values]] of Object.entries(names)) {
    if (ALARM.test(name)) continue;
    const first = name.includes("/reward") ? from - 1 : from,
      kept = steps.map((_, index) => index).filter((i) => steps[i] >= first && steps[i] < end);
    if (kept.length) found[name] = [kept.map((i) => steps[i]), kept.map((i) => values[i])];
  }
  return found;
}

// One line of one run. unit: "step", "seconds" or "tokens" of the horizontal axis.
/** @returns {Points} */
export function pointsOf(curves, clock, name, { unit, smoothing }) {
  const [steps, values] = curves[name] ?? [[], []],
    band = bandOf(curves, name);
  const at = unit === "step" ? null : new Map(clock.steps.map((step, i) => [step, clock[unit][i]]));
  return {
    x: at ? steps.map((step) => at.get(step) ?? 0) : steps,
    y: smooth(values, smoothing),
    ...(band ? { low: smooth(band[0], smoothing), high: smooth(band[1], smoothing) } : {}),
  };
}

// The 95 % interval of a score: recorded for evaluations, and of the mean reward of a step's
// groups. A mean length has the shortest and the longest rollout.
function bandOf(curves, name) {
  const along = (metric) => {
    const [steps, values] = curves[metric] ?? [[], []],
      at = new Map(steps.map((step, i) => [step, values[i]]));
    return curves[name][0].map((step) => at.get(step) ?? null);
  };
  const [low, high] =
    name === "length_mean" ? ["length_min", "length_max"] : [`${name}_low`, `${name}_high`];
  if (curves[name] && curves[low] && curves[high]) return [along(low), along(high)];
  if (name !== "reward" || !curves.reward_error) return null;
  const wide = along("reward_error").map((error) => 1.96 * (error ?? 0));
  return [-1, 1].map((sign) => curves.reward[1].map((value, i) => value + sign * wide[i]));
}

// An exponential average whose beginning is not drawn to zero. A weight of 0 changes nothing.
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0,
    total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Several runs as one line: the mean at each step, with the least and the greatest as its band.
/** @param {{ steps: number[], points: Points }[]} runs @returns {Points} */
export function bandOfSeeds(runs) {
  const at = new Map();
  for (const { steps, points } of runs)
    for (const [i, step] of steps.entries()) {
      if (points.y[i] === null) continue;
      if (!at.has(step)) at.set(step, []);
      at.get(step).push([points.x[i], points.y[i]]);
    }
  const order = [...at.keys()].sort((a, b) => a - b),
    mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length,
    along = (work) => order.map((step) => work(at.get(step)));
  return {
    x: along((each) => mean(each.map(([x]) => x))),
    y: along((each) => mean(each.map(([, y]) => y))),
    low: along((each) => Math.min(...each.map(([, y]) => y))),
    high: along((each) => Math.max(...each.map(([, y]) => y))),
  };
}

// Runs whose options differ in their seed alone are one group. A run without known options is a
// group of its own.
export function seedGroups(runs) {
  const groups = new Map();
  for (const run of runs) {
    const options = Object.entries(run.data.config).filter(([name]) => !isOfOneRun(name)),
      key = options.length ? JSON.stringify(options) : run.key;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(run);
  }
  return [...groups.values()];
}

function isOfOneRun(name) {
  return name === "seed" || name === "name" || name.endsWith(".seed");
}

// [option, [value of each run]] for each option that is not the same in all runs.
/** @returns {[string, string[]][]} */
export function differingOptions(configs) {
  const names = [...new Set(configs.flatMap((each) => Object.keys(each)))].sort();
  return names
    .map(
      (name) =>
        /** @type {[string, string[]]} */ ([name, configs.map((each) => each[name] ?? "–")]),
    )
    .filter(([, values]) => values.some((value) => value !== values[0]));
}

// [[title, [chart, …]], …]
export function inGroups(charts) {
  const left = new Set(charts),
    order = [];
  // Metrics by depth stay with the depths, even if they match another group.
  for (const [title, pattern] of GROUPS) {
    const members = [...left].filter(
      (chart) =>
        pattern.test(chart) && (title === "per depth and role" || !chart.endsWith(" by depth")),
    );
    for (const chart of members) left.delete(chart);
    if (members.length) order.push([title, members.sort(byImportance)]);
  }
  return order;
}

// Puts several lists of points on one axis: [x, values, values, …], with null where a list has no
// point.
/** @param {{ x: number[], values: (number | null)[] }[]} lists */
export function aligned(lists) {
  const all = [...new Set(lists.flatMap((list) => list.x))].sort((a, b) => a - b);
  return [
    all,
    ...lists.map(({ x, values }) => {
      const at = new Map(x.map((each, index) => [each, values[index]]));
      return all.map((each) => at.get(each) ?? null);
    }),
  ];
}

function byImportance(a, b) {
  const first = ["reward", "validation/reward", "child_reward", "reward by depth", "loss"],
    rank = (name) => first.indexOf(name) + 1 || 99;
  return rank(a) - rank(b) || (a < b ? -1 : 1);
}
