// The saved rollouts of one training step: the best and the worst, and metrics for each depth; or the
// attempts at one item, side by side with their advantages, and over the steps.

import { get } from "./api.js";
import { fill, h, toast } from "./dom.js";
import { count, many, number, oneLine, runAddress, stopWords } from "./format.js";
import { table } from "./table.js";

/** @type {import("./table.js").Column[]} */
const DEPTH_COLUMNS = [
  { name: "depth", cell: (each) => `${each.depth} ${each.kind}` },
  { name: "calls", isNumber: true, cell: (each) => number(each.calls) },
  { name: "reward", isNumber: true, cell: (each) => brief(each.reward) },
  { name: "turns", isNumber: true, cell: (each) => brief(each.turns) },
  { name: "tokens", isNumber: true, cell: (each) => count(each.sampled) },
  { name: "NLL", isNumber: true, cell: (each) => brief(each.surprise) },
  { name: "cut off", isNumber: true, cell: (each) => `${Math.round(100 * each.truncated)}%` },
];
/** @type {import("./table.js").Column[]} */
const ATTEMPT_COLUMNS = [
  {
    name: "attempt",
    isHead: true,
    cell: (row, index) => h("a", { href: runAddress(row.key) }, `attempt ${index + 1}`),
  },
  { name: "reward", isNumber: true, cell: (row) => number(row.reward) },
  { name: "advantage", isNumber: true, cell: (row) => signed(row.advantage) },
  { name: "tokens", isNumber: true, cell: (row) => count(row.tokens) },
  { name: "calls", isNumber: true, cell: (row) => number(row.num_calls) },
  { name: "ended", cell: (row) => stopWords(row.stop)[0] },
  {
    name: "answer",
    cell: (row) =>
      h("span", { title: row.answer || row.error }, oneLine(row.answer || row.error || "–", 40)),
  },
];
/** @type {import("./table.js").Column[]} */
const HISTORY_COLUMNS = [
  { name: "step", isHead: true, cell: ({ step }) => number(step) },
  { name: "mean reward", isNumber: true, cell: ({ rows }) => number(meanReward(rows)) },
  {
    name: "attempts",
    cell: ({ rows }) =>
      rows.map((row) => [h("a", { href: runAddress(row.key) }, number(row.reward)), " "]),
  },
];
const MAX_COMPARED = 8; // runs that the comparison shows
const MAX_ROWS = 5; // best ones, and as many worst ones

export class Samples {
  // kept: the steps with saved rollouts
  constructor(key, kept) {
    this.key = key;
    this.kept = kept;
    this.element = h("section.samples", { hidden: true, "aria-label": "rollouts of a step" });
  }

  // Go to the previous or next step with saved rollouts.
  move(by) {
    const step = this.kept[this.kept.indexOf(this.step) + by];
    if (step !== undefined) this.showStep(step);
  }

  // The nearest step with saved rollouts.
  showNear(step) {
    if (this.kept.length)
      this.showStep(
        this.kept.reduce((best, each) =>
          Math.abs(each - step) < Math.abs(best - step) ? each : best,
        ),
      );
  }

  async showStep(step) {
    try {
      this.drawSamples(await get("/api/samples", { key: this.key, step }));
    } catch (error) {
      toast(error.message);
    }
  }

  async showItem(item) {
    try {
      this.drawItem(await get("/api/item", { key: this.key, item }));
    } catch (error) {
      toast(error.message);
    }
  }

  // Attempts of the shown step, else of the last one that has any.
  drawItem({ item, steps, problems }) {
    const shown = steps.find(({ step }) => step === this.step) ?? steps.at(-1),
      { rows } = shown,
      isComparable = rows.length > 1 && rows.length <= MAX_COMPARED;
    fill(
      this.element,
      h(
        "div.samples-head",
        null,
        h("b", null, `item ${item}`),
        h("span.spread"),
        h(
          "button.small",
          { type: "button", onclick: () => this.showStep(this.step) },
          "all rollouts",
        ),
        h("span.quiet", null, oneLine(rows[0].question, 300)),
      ),
      problems.map((text) => h("p.problem", null, text)),
      h("h3.item-title", null, `step ${number(shown.step)}: ${many(rows.length, "attempt")}`),
      h(
        "div.scroll-x",
        { tabindex: "0", role: "group", "aria-label": "attempts" },
        table("table.depths", ATTEMPT_COLUMNS, rows),
      ),
      isComparable
        ? h(
            "p.item-title",
            null,
            h(
              "a",
              { href: `#/compare/${rows.map((row) => encodeURIComponent(row.key)).join("/")}` },
              "compare these attempts",
            ),
          )
        : null,
      h("h3.item-title", null, `across ${many(steps.length, "saved step")}`),
      h(
        "div.scroll-x",
        { tabindex: "0", role: "group", "aria-label": "steps" },
        table("table.depths", HISTORY_COLUMNS, steps),
      ),
    );
    this.element.hidden = false;
  }

  drawSamples({ step, rows, problems, depths }) {
    this.step = step;
    const kept = this.kept,
      at = kept.indexOf(step),
      move = (by) => this.showStep(kept[Math.min(kept.length - 1, Math.max(0, at + by))]);
    const shown =
      rows.length <= 2 * MAX_ROWS || this.whole
        ? rows
        : [...rows.slice(0, MAX_ROWS), null, ...rows.slice(-MAX_ROWS)];
    const mean = meanReward(rows),
      items = [...new Set(rows.map((row) => row.task))].filter(Boolean);
    fill(
      this.element,
      h(
        "div.samples-head",
        null,
        h("b", null, "rollouts"),
        h("span.spread"),
        h(
          "button.small",
          {
            type: "button",
            onclick: () => move(-1),
            disabled: at <= 0,
            "aria-label": "earlier step",
          },
          "←",
        ),
        h(
          "select",
          { "aria-label": "step", onchange: (event) => this.showStep(Number(event.target.value)) },
          kept.map((each) =>
            h("option", { value: String(each), selected: each === step }, `step ${each}`),
          ),
        ),
        h(
          "button.small",
          {
            type: "button",
            onclick: () => move(1),
            disabled: at >= kept.length - 1,
            "aria-label": "later step",
          },
          "→",
        ),
        items.length
          ? h(
              "select.item-choice",
              {
                "aria-label": "item",
                onchange: (event) => this.showItem(event.target.value),
              },
              h("option", { value: "" }, `choose one of ${many(items.length, "item")}`),
              items.map((item) => h("option", { value: item }, item)),
            )
          : null,
        h(
          "span.quiet",
          null,
          `${many(rows.length, "rollout")}${mean === null ? "" : `, mean reward ${number(mean)}`}, best first`,
        ),
      ),
      problems.map((text) => h("p.problem", null, text)),
      h(
        "div.rollouts",
        null,
        shown.map((row) =>
          row
            ? sampleRow(row)
            : h(
                "button.unfold",
                {
                  type: "button",
                  onclick: () => {
                    this.whole = true;
                    this.drawSamples({ step, rows, problems, depths });
                  },
                },
                `${many(rows.length - 2 * MAX_ROWS, "more rollout")} between the best and the worst`,
              ),
        ),
      ),
      h("div.scroll-x", null, table("table.depths", DEPTH_COLUMNS, depths)),
    );
    this.element.hidden = false;
  }
}

function meanReward(rows) {
  const known = rows.filter((row) => row.reward !== null);
  return known.length ? known.reduce((sum, row) => sum + row.reward, 0) / known.length : null;
}

function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value);
}

function sampleRow(row) {
  const [words, tone] = stopWords(row.stop);
  return h(
    "a.rollout",
    { href: runAddress(row.key) },
    h("b.num", null, number(row.reward)),
    h("span.asked", null, oneLine(row.question, 160) || row.id),
    h(
      "span.came",
      { class: row.answer ? "" : "bad" },
      oneLine(row.answer || row.error || "no answer", 160),
    ),
    h(
      "span.quiet",
      null,
      h("span", { class: `mark ${tone}` }, words),
      ` · ${many(row.num_calls, "call")} · ${count(row.tokens)} tokens`,
    ),
  );
}

function brief(value) {
  return value === null ? "–" : String(Number(value.toPrecision(2)));
}
