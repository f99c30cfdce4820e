// Evaluations: the list of records; and for one record its score with interval, pass@k, the scores
// of each kind of item, the difference from another evaluation, and links to the runs of its
// attempts.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { FilterInput } from "./filter.js";
import { count, dollars, many, number, oneLine, runAddress, seconds, stopWords } from "./format.js";
import { VirtualList } from "./list.js";
import { listRecords, showNothing } from "./records.js";
import { listPlaces } from "./run_list.js";
import { table } from "./table.js";

const EVERY_MS = 2000; // between requests while attempts are still being made

// What attempts can be filtered by.
/** @type {import("./filter.js").Fields} */
const ATTEMPT_FIELDS = {
  numbers: {
    reward: (each) => each.reward,
    seconds: (each) => each.seconds,
    tokens: (each) => each.tokens,
  },
  texts: {
    item: (each) => each.item,
    kind: (each) => each.kind,
    answer: (each) => each.answer,
    error: (each) => each.error,
    stop: (each) => each.stop,
    result: resultOf,
  },
  words: (each) =>
    `${each.item} ${each.kind} ${each.answer} ${each.error} ${stopWords(each.stop)[0]} ${resultOf(each)}`,
};

function resultOf(each) {
  return each.reward === null ? "failed" : each.right ? "right" : "wrong";
}

export async function evaluationPage(page, keys) {
  const { evaluations } = await listPlaces();
  document.title = "Evaluations · Ramify";
  if (!keys.length) return listed(page, evaluations);
  const view = new EvaluationView(evaluations, keys[0], keys[1] || "");
  await view.start(page);
  return view;
}

function evaluationAddress(key, other = "") {
  return `#/evaluation/${encodeURIComponent(key)}${other ? `/${encodeURIComponent(other)}` : ""}`;
}

/** @type {import("./table.js").Column[]} */
const RECORD_COLUMNS = [
  {
    name: "evaluation",
    cell: (each) => h("a", { href: evaluationAddress(each.key) }, each.name),
  },
  { name: "score", isNumber: true, cell: (each) => number(each.score ?? null) },
  { name: "model", cell: (each) => each.model || "" },
  { name: "task", cell: (each) => `${each.task}${each.split ? `/${each.split}` : ""}` },
  { name: "items", isNumber: true, cell: (each) => number(each.items || 0) },
  { name: "attempts", isNumber: true, cell: (each) => number(each.attempts || 0) },
  { name: "made", isNumber: true, cell: (each) => number(each.num_made || 0) },
  { name: "cost", isNumber: true, cell: (each) => dollars(each.cost) },
];

function listed(page, evaluations) {
  if (evaluations.length) {
    listRecords(page, "Evaluations", "record", RECORD_COLUMNS, evaluations, {
      problem: (each) => each.problem,
    });
  } else {
    const command = "ramify eval TASK --model MODEL";
    const missing = "The given paths contain no evaluation.";
    showNothing(page, "Evaluations", missing, "Create one with", command);
  }
  return null;
}

class EvaluationView {
  constructor(evaluations, key, other) {
    this.evaluations = evaluations;
    this.key = key;
    this.other = other; // of the evaluation that it is compared with, or ""
    this.data = null; // until the report has arrived: a filter may be typed before
    this.shown = [];
    this.list = new VirtualList({
      rowHeight: 34,
      make,
      show: (row, index) => showAttempt(row, this.shown[index]),
      label: "attempts",
      pick: (index) => {
        const { run } = this.shown[index];
        if (run) location.hash = runAddress(run);
      },
    });
    this.list.onmove = () => {};
  }

  async start(page) {
    this.body = h("div.evaluation");
    this.filter = new FilterInput(ATTEMPT_FIELDS, {
      label: "filter attempts",
      placeholder: "filter attempts: item, kind, answer, stop, right, wrong",
      changed: () => this.data && this.arrange(),
      id: "filter",
    });
    this.tally = h("span.quiet", { "aria-live": "polite" });
    fill(
      page,
      h(
        "div.wide",
        null,
        this.body,
        h(
          "div.wide-head",
          null,
          h("h2", null, "Attempts"),
          this.filter.input,
          this.tally,
          this.filter.fix,
        ),
        h("div.attempts", null, this.list.box),
      ),
    );
    await this.load();
    this.timer = setInterval(
      () => this.data.num_made < this.planned && !document.hidden && this.load().catch(() => {}),
      EVERY_MS,
    );
  }

  close() {
    clearInterval(this.timer);
    this.list.close();
  }

  async load() {
    this.data = await get(
      "/api/evaluation",
      this.other ? { key: this.key, other: this.other } : { key: this.key },
    );
    this.planned = this.data.plan.items * this.data.plan.attempts;
    this.draw();
    this.arrange();
  }

  draw() {
    const { data } = this,
      { plan, report } = data;
    const same = this.evaluations.filter(
      (each) =>
        each.key !== this.key &&
        each.task === plan.task &&
        each.split === plan.split &&
        !each.problem,
    );
    const choose = h(
      "select",
      {
        "aria-label": "compared with",
        onchange: () => (location.hash = evaluationAddress(this.key, choose.value)),
      },
      h("option", { value: "" }, "compare with: none"),
      same.map((each) =>
        h(
          "option",
          { value: each.key, selected: each.key === this.other },
          `${each.name} · ${each.model}`,
        ),
      ),
    );
    document.title = `${plan.task} · ${plan.model} · Ramify`;
    fill(
      this.body,
      h(
        "div.wide-head",
        null,
        h("h1", null, `${plan.task}/${plan.split}`),
        h("span.badge", null, plan.model),
        h(
          "span.quiet",
          null,
          `${many(plan.items, "item")}, ${many(plan.attempts, "attempt")} each${data.num_made < this.planned ? ` · ${number(data.num_made)} of ${number(this.planned)} made` : ""}`,
        ),
        same.length ? choose : null,
        h("a.small", { href: "#/evaluation" }, "all evaluations"),
      ),
      h("p.quiet.file", null, data.path),
      data.problems.map((text) => h("p.problem", { role: "alert" }, text)),
      report
        ? PANELS.map((panel) => panel(report, data))
        : h("p.note", null, "No attempt has been made yet."),
    );
  }

  arrange() {
    const { attempts } = this.data;
    this.shown = attempts.filter(this.filter.matches);
    const shown = this.filter.text.trim() ? `${number(this.shown.length)} of ` : "";
    fill(this.tally, `${shown}${number(attempts.length)}`);
    this.list.box.style.height = `${Math.min(15, Math.max(1, this.shown.length)) * 34 + 2}px`;
    this.list.set(this.shown.length);
  }

  keys() {
    return { "/": ["filter attempts", () => this.filter.focus()] };
  }
}

// --- panels ------------------------------------------------------------------------------------

// What is shown of a report, from top to bottom. A panel receives the report and what the server
// sent with it, and gives elements, or null if it has nothing to show. A new one is a module, and a
// line here.
const PANELS = [tiles, compared, kinds, rest];

function tiles(report) {
  const all = report.rows[0],
    spent = report.spent,
    tile = (name, value, figure) =>
      h(
        "div.tile",
        null,
        h("dt", null, name),
        h("dd", null, value),
        figure ? interval(figure) : null,
      );
  return h(
    "dl.tiles",
    { "aria-label": "figures" },
    all.average ? tile(`avg@${report.plan.attempts}`, shownFigure(all.average), all.average) : null,
    report.k > 1 && all.passes
      ? tile(`pass@${report.k}`, shownFigure(all.passes), all.passes)
      : null,
    report.k > 1 && all.majority
      ? tile(`majority@${report.k}`, shownFigure(all.majority), all.majority)
      : null,
    tile(
      "attempts",
      `${number(report.attempts)}${report.failed ? `, ${number(report.failed)} failed` : ""}`,
    ),
    tile("cost", dollars(spent.cost)),
    tile("tokens", `${count(spent.input_tokens)} in, ${count(spent.output_tokens)} out`),
    tile(
      "an attempt",
      `${seconds(spent.seconds_mean)}, ${number(spent.turns_mean)} turns, ${number(spent.calls_mean)} calls`,
    ),
  );
}

function compared(_, data) {
  const found = data.compared;
  if (!found) return null;
  if (found.problem) return h("p.problem", null, found.problem);
  const { value, low, high } = found.difference,
    sure = low > 0 || high < 0;
  return h(
    "p.parting",
    { role: "note" },
    `${value >= 0 ? "+" : ""}${value.toFixed(3)} [${low.toFixed(3)} ${high.toFixed(3)}] against ${found.name}, over ${many(found.items, "item")}: ${sure ? (value > 0 ? "better" : "worse") : "no difference that is sure"}.`,
  );
}

// Bars with intervals for each kind of item, and pass@k for each k.
function kinds(report, { passes }) {
  const several = report.k > 1;
  const figure = (name, of) => ({
    name,
    cell: (row) =>
      of(row)
        ? [h("span.num", null, shownFigure(of(row))), bar(of(row))]
        : h("span.quiet", null, "–"),
  });
  const columns = [
    { name: "kind", cell: (row) => row.kind || "(no kind)" },
    { name: "items", isNumber: true, cell: (row) => number(row.items) },
    figure("mean reward", (row) => row.average),
    ...(several
      ? [
          figure(`pass@${report.k}`, (row) => row.passes),
          figure(`majority@${report.k}`, (row) => row.majority),
        ]
      : []),
  ];
  const each = [
    { name: "k", isNumber: true, cell: ([k]) => number(k) },
    {
      name: "pass@k",
      cell: ([, value]) => [h("span.num", null, value.toFixed(3)), bar({ value })],
    },
  ];
  return h(
    "div.beside-figures",
    null,
    h("div.scroll-x", null, table("table.figures", columns, report.rows, { label: "by kind" })),
    passes.length > 1 ? table("table.figures.passes", each, passes, { label: "pass@k" }) : null,
  );
}

function rest(report) {
  const named = { ...report.rewards, ...report.metrics },
    parts = Object.entries(named).map(([name, value]) => `${name} ${number(value)}`);
  const stops = Object.entries(report.stops).map(
    ([stop, many]) => `${number(many)} ${stopWords(stop === "None" ? null : stop)[0]}`,
  );
  return [
    h(
      "p.quiet",
      null,
      `ended: ${stops.join(", ")}${parts.length > 1 ? ` · means: ${parts.join(", ")}` : ""}`,
    ),
    report.failed
      ? h(
          "p.problem",
          null,
          `${many(report.failed, "attempt")} failed and ${report.failed === 1 ? "is" : "are"} left out; the first: ${report.first_error}`,
        )
      : null,
  ];
}

function shownFigure({ value }) {
  return value.toFixed(3);
}

function interval({ low, high }) {
  return h("small.quiet", null, low === high ? "" : `${low.toFixed(3)} to ${high.toFixed(3)}`);
}

// A bar for a value from 0 to 1, with its interval as a band across the end.
/** @param {{ value: number, low?: number, high?: number }} figure */
function bar({ value, low, high }) {
  const percent = (share) => `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
  const words =
    low === undefined || low === high ? "" : `between ${low.toFixed(3)} and ${high.toFixed(3)}`;
  return h(
    "span.meter",
    { title: words },
    h("i", { style: { width: percent(value) } }),
    words
      ? h("b", {
          style: { left: percent(low), width: percent(Math.min(1, high) - Math.max(0, low)) },
        })
      : null,
  );
}

function make() {
  return h(
    "div.attempt",
    null,
    h("span.num.worth"),
    h("span.item"),
    h("span.answer-of"),
    h("span.mark"),
    h("span.num.took"),
    h("span.quiet.leads"),
  );
}

function showAttempt(row, each) {
  const [worth, item, answer, mark, took, leads] = row.children,
    [words, tone] = stopWords(each.stop);
  worth.textContent = each.reward === null ? "–" : number(each.reward);
  worth.className = `num worth ${each.reward === null ? "" : each.right ? "good" : "bad"}`;
  item.textContent = `${each.item}${each.attempt ? ` #${each.attempt + 1}` : ""}${each.kind ? ` · ${each.kind}` : ""}`;
  answer.textContent = oneLine(each.answer || each.error || "no answer", 160);
  answer.classList.toggle("bad", !each.answer);
  mark.textContent = words;
  mark.className = `mark ${tone}`;
  took.textContent = `${seconds(each.seconds)} · ${count(each.tokens)} tokens`;
  leads.textContent = each.run ? "run →" : "";
  row.classList.toggle("dead", !each.run);
  row.title = `${each.answer || each.error}`;
}
