// Groups the metrics into charts, orders the charts, and converts the lines of a chart for the
// plot.

// Groups of metrics in this order; metrics without a group come last.
/** @type {[string, RegExp][]} */
const GROUPS = [
  ["reward", /^(reward|child_reward|groups_with_signal|.*\/reward)$/],
  ["pass@k and other evaluations", /pass[@_]|^(validation|test|train)\//],
  ["loss", /(^|_)loss$|^grad_norm$|^lr$/],
  ["policy: KL, entropy, clip share", /kl$|entropy|clip/],
  ["off-policy: sampler mismatch, effective sample size, staleness", /mismatch|^ess$|stale/],
  ["per depth and role", /by depth$|role|^calls_per_rollout$|^turns_per_call$|child_/],
  ["signals", /^signal|hint|judge|process|hindsight|teacher/],
  ["speed", /tokens_per_s|_s$|cpu|by batch$/],
  ["rollouts and sizes", /./],
];
const LAYER = /^(depth|batch)(\d+)\.(\w+)\/(\w+)$/; // as in depth1.rlm/reward, batch16.decode/steps
const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--live", "--bad"];

// Chart -> [{ name, label }]: one line per chart, but metrics of each depth share one chart.
export function chartsOf(names) {
  const charts = new Map();
  for (const name of names) {
    const layer = LAYER.exec(name),
      chart = layer ? `${layer[4]} by ${layer[1]}` : name;
    if (!charts.has(chart)) charts.set(chart, []);
    charts.get(chart).push({ name, label: layer ? `${layer[2]} ${layer[3]}` : "" });
  }
  for (const lines of charts.values()) {
    lines.sort((a, b) => (a.name < b.name ? -1 : 1));
    for (const [index, line] of lines.entries()) line.colour = COLOURS[index % COLOURS.length];
  }
  return charts;
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

// Merges several [steps, values] over the union of their steps: [steps, values, values, …].
export function aligned(lines) {
  const known = lines.filter(Boolean),
    steps = known[0] ? known[0][0] : [];
  const same = lines.every(
    (line) =>
      line &&
      line[0].length === steps.length &&
      line[0].every((step, index) => step === steps[index]),
  );
  if (same) return [steps, ...lines.map((line) => line[1])];
  const all = [...new Set(known.flatMap((line) => line[0]))].sort((a, b) => a - b);
  return [
    all,
    ...lines.map((line) => {
      const at = new Map(line ? line[0].map((step, index) => [step, line[1][index]]) : []);
      return all.map((step) => at.get(step) ?? null);
    }),
  ];
}

function byImportance(a, b) {
  const first = ["reward", "validation/reward", "child_reward", "reward by depth", "loss"],
    rank = (name) => first.indexOf(name) + 1 || 99;
  return rank(a) - rank(b) || (a < b ? -1 : 1);
}
