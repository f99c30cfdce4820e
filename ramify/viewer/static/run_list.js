// What the viewer's places contain: runs, evaluations and training folders. It stays in memory
// between pages, and only what changed is requested again (viewer/run_list_updates.py).

import { get } from "./api.js";

const NO_LABELS = [];
const places = {
  version: "",
  byKey: new Map(),
  shown: {
    runs: [], // newest first
    evaluations: [],
    matrices: [],
    trainings: [],
    problems: [],
    places: [],
  },
};
let asked = null; // the request that is on its way

// { runs, evaluations, trainings, problems, places, changed }
export function listPlaces() {
  asked ??= get("/api/runs/changes", { since: places.version })
    .then(take)
    .finally(() => {
      asked = null;
    });
  return asked;
}

function take({ version, num, whole, columns, gone, ...others }) {
  const { byKey } = places,
    changed = Boolean(whole || num || gone) || version !== places.version;
  places.version = version;
  if (whole) byKey.clear();
  for (const key of gone || []) byKey.delete(key);
  if (num) {
    const of = Object.fromEntries(
      Object.entries(columns).map(([name, each]) => [
        name,
        Array.isArray(each) ? each : new Array(num).fill(each),
      ]),
    );
    for (let at = 0; at < num; at++) byKey.set(of.key[at], runAt(of, at));
  }
  const runs =
    whole || num || gone
      ? [...byKey.values()].sort((a, b) => b.started_at - a.started_at)
      : places.shown.runs;
  places.shown = { ...places.shown, ...others, runs };
  return { ...places.shown, changed };
}

// Fields are written out, because it creates ten thousand objects several times faster.
function runAt(of, at) {
  return {
    key: of.key[at],
    id: of.id[at],
    question: of.question[at],
    model: of.model[at],
    started_at: of.started_at[at],
    seconds: of.seconds[at],
    depth: of.depth[at],
    num_calls: of.num_calls[at],
    tokens: of.tokens[at],
    cost: of.cost[at],
    stop: of.stop[at],
    reward: of.reward[at],
    alive: of.alive[at],
    source: of.source[at],
    task: of.task[at],
    problem: of.problem[at],
    answer: of.answer[at],
    ending: of.ending[at],
    labels: of.labels[at] || NO_LABELS,
    note: of.note[at],
    corrected: of.corrected[at],
  };
}
