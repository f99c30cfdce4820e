// Evaluations: the list of records; and for one record its score with interval, pass@k, the scores
// of each kind of item, the difference from another evaluation, and links to the runs of its
// attempts.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { count, dollars, many, number, oneLine, runAddress, seconds, stopWords } from "./format.js";
import { VirtualList } from "./list.js";

const EVERY_MS = 2000; // between requests while attempts are still being made

export async function evaluationPage(page, keys) {
  const { evaluations } = await get("/api/runs");
  document.title = "Evaluations · Ramify";
  if (!keys.length) return listed(page, evaluations);
  const view = new EvaluationView(evaluations, keys[0], keys[1] || "");
  await view.start(page);
  return view;
}

function evaluationAddress(key, other = "") {
  return `#/evaluation/${encodeURIComponent(key)}${other ? `/${encodeURIComponent(other)}` : ""}`;
}

function listed(page, evaluations) {
  if (!evaluations.length) {
    fill(
      page,
      h(
        "div.empty",
        null,
        h("h1", null, "Evaluations"),
        h("p", null, "The given paths contain no evaluation."),
        h("p", null, "Create one with ", h("code", null, "ramify eval TASK --model MODEL")),
      ),
    );
    return null;
  }
  const heads = ["evaluation", "score", "model", "task", "items", "attempts", "made", "cost"],
    numbers = new Set(["score", ...heads.slice(4)]);
  const row = (each) =>
    h(
      "tr",
      null,
      [
        h("a", { href: evaluationAddress(each.key) }, each.name),
        ...(each.problem
          ? [h("span.bad", null, each.problem)]
          : [
              number(each.score ?? null),
              each.model || "",
              `${each.task}${each.split ? `/${each.split}` : ""}`,
              number(each.items || 0),
              number(each.attempts || 0),
              number(each.num_made || 0),
              dollars(each.cost),
            ]),
      ].map((cell, index) =>
        h(
          "td",
          {
            class: !each.problem && numbers.has(heads[index]) ? "num" : "",
            colspan: each.problem && index ? "7" : null,
          },
          cell,
        ),
      ),
    );
  fill(
    page,
    h(
      "div.wide",
      null,
      h(
        "div.wide-head",
        null,
        h("h1", null, "Evaluations"),
        h("span.quiet", null, many(evaluations.length, "record")),
      ),
      h(
        "div.scroll-x",
        null,
        h(
          "table.figures.records",
          null,
          h(
            "thead",
            null,
            h(
              "tr",
              null,
              heads.map((name) => h("th", { class: numbers.has(name) ? "num" : "" }, name)),
            ),
          ),
          h("tbody", null, evaluations.map(row)),
        ),
      ),
    ),
  );
  return null;
}

class EvaluationView {
  constructor(evaluations, key, other) {
    this.evaluations = evaluations;
    this.key = key;
    this.other = other; // of the evaluation that it is compared with, or ""
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
    this.filter = h("input", {
      type: "search",
      id: "filter",
      placeholder: "filter attempts: item, kind, answer, stop, right, wrong",
      "aria-label": "filter attempts",
      oninput: () => this.arrange(),
    });
    this.tally = h("span.quiet", { "aria-live": "polite" });
    fill(
      page,
      h(
        "div.wide",
        null,
        this.body,
        h("div.wide-head", null, h("h2", null, "Attempts"), this.filter, this.tally),
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
        ? [this.tiles(report), this.compared(), this.kinds(report), this.rest(report)]
        : h("p.note", null, "No attempt has been made yet."),
    );
  }

  tiles(report) {
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
      all.average
        ? tile(`avg@${report.plan.attempts}`, shownFigure(all.average), all.average)
        : null,
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

  compared() {
    const found = this.data.compared;
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
  kinds(report) {
    const several = report.k > 1,
      heads = [
        "kind",
        "items",
        "mean reward",
        ...(several ? [`pass@${report.k}`, `majority@${report.k}`] : []),
      ];
    const cell = (figure) =>
      h(
        "td",
        null,
        figure
          ? [h("span.num", null, shownFigure(figure)), bar(figure)]
          : h("span.quiet", null, "–"),
      );
    return h(
      "div.beside-figures",
      null,
      h(
        "div.scroll-x",
        null,
        h(
          "table.figures",
          { "aria-label": "by kind" },
          h(
            "thead",
            null,
            h(
              "tr",
              null,
              heads.map((name) => h("th", null, name)),
            ),
          ),
          h(
            "tbody",
            null,
            report.rows.map((row) =>
              h(
                "tr",
                null,
                h("td", null, row.kind || "(no kind)"),
                h("td.num", null, number(row.items)),
                cell(row.average),
                several ? [cell(row.passes), cell(row.majority)] : null,
              ),
            ),
          ),
        ),
      ),
      this.data.passes.length > 1
        ? h(
            "table.figures.passes",
            { "aria-label": "pass@k" },
            h("thead", null, h("tr", null, h("th", null, "k"), h("th", null, "pass@k"))),
            h(
              "tbody",
              null,
              this.data.passes.map(([k, value]) =>
                h(
                  "tr",
                  null,
                  h("td.num", null, number(k)),
                  h("td", null, h("span.num", null, value.toFixed(3)), bar({ value })),
                ),
              ),
            ),
          )
        : null,
    );
  }

  rest(report) {
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

  arrange() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.shown = this.data.attempts.filter((each) => {
      const text =
        `${each.item} ${each.kind} ${each.answer} ${each.error} ${stopWords(each.stop)[0]} ${each.reward === null ? "failed" : each.right ? "right" : "wrong"}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    fill(
      this.tally,
      words.length
        ? `${number(this.shown.length)} of ${number(this.data.attempts.length)}`
        : number(this.data.attempts.length),
    );
    this.list.box.style.height = `${Math.min(15, Math.max(1, this.shown.length)) * 34 + 2}px`;
    this.list.set(this.shown.length);
  }

  keys() {
    return { "/": ["filter attempts", () => this.filter.focus()] };
  }
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
