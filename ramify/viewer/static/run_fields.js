// What the runs of the list can be filtered, grouped and narrowed by.

/** @type {import("./filter.js").Fields} */
export const RUN_FIELDS = {
  numbers: {
    cost: (run) => run.cost,
    tokens: (run) => run.tokens || 0,
    calls: (run) => run.num_calls || 0,
    seconds: (run) => run.seconds || 0,
    depth: (run) => run.depth || 0,
    reward: (run) => run.reward,
  },
  times: { when: (run) => run.started_at },
  texts: {
    stop: stopOf,
    model: (run) => run.model || "",
    task: (run) => run.task || "",
    question: (run) => run.question || "",
    answer: (run) => run.answer ?? "",
    label: (run) => (run.labels || []).join("\n"),
    note: (run) => run.note || "",
    corrected: (run) => Object.keys(run.corrected || {}).join("\n"),
    id: (run) => run.id,
    file: (run) => run.source || "",
    origin: originOf,
  },
  words: textOfRun,
  // as in store/run_filter.py
  groups: ["origin", "task", "model", "stop", "label", "question"],
};

// Where a run came from: a question of a user, an evaluation, or a rollout of training.
function originOf(run) {
  return /(^|\/)rollouts\//.test(run.source || "") ? "rollout" : run.task ? "evaluation" : "asked";
}

function stopOf(run) {
  return run.problem ? "unreadable" : run.stop || (run.alive ? "running" : "interrupted");
}

function textOfRun(run) {
  const stop = stopOf(run);
  return [
    run.question,
    run.model,
    stop,
    stop.replaceAll("_", " "),
    run.id,
    run.task,
    run.source,
    run.answer,
    (run.labels || []).join(" "),
    run.note,
    run.problem,
  ].join(" ");
}

// [[field, value, number of runs], …]: what the runs can be narrowed by.
export function facets(runs) {
  const found = [];
  /** @type {[string, (run: any) => any][]} */
  const narrowing = [
    ["origin", originOf],
    ["stop", stopOf],
    ["model", RUN_FIELDS.texts.model],
    ["task", RUN_FIELDS.texts.task],
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
