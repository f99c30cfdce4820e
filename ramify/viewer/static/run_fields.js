// What the runs of the list can be filtered, grouped, folded and narrowed by.

import { timeSpan } from "./filter.js";

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
  for (const day of ["today", "yesterday"]) {
    const [from, to] = timeSpan(day, new Date()),
      num = runs.filter(({ started_at }) => started_at >= from && started_at < to).length;
    if (num && num < runs.length) found.push(["when", day, num]);
  }
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

// The runs that a person asked for, and one fold for each training folder and each task of
// evaluations: { runs, words, filter }, where `filter` selects its runs. Null if that would leave a
// single row.
export function folds(runs) {
  const asked = [],
    found = new Map();
  for (const run of runs) {
    const origin = originOf(run);
    if (origin === "asked") asked.push(run);
    else {
      const folder = origin === "rollout" ? run.source.replace(/(^|\/)rollouts\/[^/]*$/, "") : "",
        key = `${origin} ${folder || run.task}`;
      if (!found.has(key)) found.set(key, { runs: [], origin, folder, task: run.task });
      found.get(key).runs.push(run);
    }
  }
  if (!asked.length && found.size < 2) return null;
  const made = [...found.values()].map(({ runs, origin, folder, task }) =>
    origin === "rollout"
      ? {
          runs,
          words: `rollouts of ${folder.split("/").pop()}`,
          filter: `origin:rollout file:${quotedValue(`${folder}/rollouts/`)}`,
        }
      : {
          runs,
          words: `evaluation of ${task}`,
          filter: `origin:evaluation task=${quotedValue(task)}`,
        },
  );
  return { asked, made };
}

// A value as a part of the filter.
export function quotedValue(value) {
  return /\s/.test(value) ? `"${value.replaceAll('"', "")}"` : value || "none";
}

// The 50th and 90th percentile of numbers, or null for none.
export function percentiles(values) {
  const sorted = values.filter((value) => typeof value === "number").sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  return sorted.length ? [at(0.5), at(0.9)] : null;
}
