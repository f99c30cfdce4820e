// Evaluations: the list of records; and for one record its score with interval, the matrix of items
// and attempts beside the answer that is chosen, the scores of each kind of item, and the
// difference from another evaluation.
//
//   #/evaluation/KEY[/OTHER]?filter=…&sort=…&at=ITEM/ATTEMPT      all of it is in the address

import { get } from "./api.js";
import { fill, h, toast } from "./dom.js";
import { FilterInput } from "./filter.js";
import { count, dollars, many, number, oneLine, runAddress, seconds, stopWords } from "./format.js";
import { VirtualList } from "./list.js";
import { listRecords, showNothing } from "./records.js";
import { listPlaces } from "./run_list.js";
import { table } from "./table.js";
import { AnswerCard, agreementWords, saveNote, sayVerdict } from "./verdicts.js";

const EVERY_MS = 2000; // between requests while attempts are still being made
const ROW = 34; // pixels
const MOST_ROWS = 16; // that are in sight at once
const SIGNS = { right: "✓", wrong: "✗", cut: "…", failed: "!" };
const TONES = { right: "good", wrong: "bad", cut: "warn", failed: "failed" };

// What attempts can be filtered by.
/** @type {import("./filter.js").Fields} */
const ATTEMPT_FIELDS = {
  numbers: {
    reward: (each) => each.reward,
    seconds: (each) => each.seconds,
    tokens: (each) => each.tokens,
    cost: (each) => each.cost,
  },
  texts: {
    item: (each) => each.item,
    kind: (each) => each.kind,
    question: (each) => each.question,
    expected: (each) => each.expected,
    answer: (each) => each.answer,
    error: (each) => each.error,
    stop: (each) => each.stop,
    result: resultOf,
    flipped: (each) => each.flipped,
    mixed: (each) => (each.mixed ? "yes" : ""),
    label: (each) => [...each.labels, each.verdict].filter(Boolean).join("\n"),
    note: (each) => each.note,
  },
  words: (each) =>
    [
      each.item,
      each.kind,
      each.question,
      each.answer,
      each.error,
      stopWords(each.stop)[0],
      resultOf(each),
      each.flipped ? `flipped ${each.flipped}` : "",
      each.verdict,
    ].join(" "),
};

// right, wrong, cut short by a limit, or failed for reasons outside the model.
function resultOf(each) {
  if (each.reward === null) return "failed";
  if (each.right) return "right";
  return stopWords(each.stop)[1] === "warn" ? "cut" : "wrong";
}

/** @type {Record<string, { words: string, key: (item: any) => number | string }>} */
const SORTS = {
  "": { words: "task order", key: (item) => item.index },
  worst: { words: "worst first", key: (item) => item.mean ?? Infinity },
  best: { words: "best first", key: (item) => -(item.mean ?? -Infinity) },
  mixed: {
    words: "most disagreement first",
    key: (item) => (item.mean === null ? 1 : Math.abs(item.mean - 0.5)),
  },
  flipped: { words: "flipped first", key: (item) => (item.flipped ? 0 : 1) },
  item: { words: "by item", key: (item) => item.name },
  cost: { words: "most expensive first", key: (item) => -item.cost },
};

export async function evaluationPage(page, keys, query = new URLSearchParams()) {
  const { evaluations, matrices } = await listPlaces();
  document.title = "Evaluations · Ramify";
  if (!keys.length) return listed(page, evaluations, matrices);
  const view = new EvaluationView(evaluations, keys[0], keys[1] || "", query);
  await view.start(page);
  return view;
}

function evaluationAddress(key, other = "", query = "") {
  const path = `#/evaluation/${encodeURIComponent(key)}${other ? `/${encodeURIComponent(other)}` : ""}`;
  return query ? `${path}?${query}` : path;
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
  { name: "done", isNumber: true, cell: (each) => number(each.num_made || 0) },
  { name: "cost", isNumber: true, cell: (each) => dollars(each.cost) },
];

/** @type {import("./table.js").Column[]} */
const MATRIX_COLUMNS = [
  {
    name: "matrix",
    cell: (each) => h("a", { href: `#/matrix/${encodeURIComponent(each.key)}` }, each.name),
  },
  { name: "suites", cell: (each) => (each.suites || []).join(", ") },
  { name: "models", cell: (each) => (each.models || []).join(", ") },
  { name: "modes", cell: (each) => (each.modes || []).join(", ") },
  { name: "cells", isNumber: true, cell: (each) => number(each.cells || 0) },
  { name: "attempts", isNumber: true, cell: (each) => number(each.planned || 0) },
];

function listed(page, evaluations, matrices) {
  // The cells of a matrix are on its page.
  const single = evaluations.filter(
      (each) => !matrices.some((matrix) => each.name.startsWith(`${matrix.name}-`)),
    ),
    options = { problem: (each) => each.problem };
  if (evaluations.length || matrices.length) {
    const view = listRecords(page, "Evaluations", "record", RECORD_COLUMNS, single, options);
    if (matrices.length)
      page.firstElementChild.prepend(
        h("div.wide-head", null, h("h1", null, "Matrices")),
        h(
          "div.scroll-x",
          null,
          table("table.figures.records", MATRIX_COLUMNS, matrices, {
            label: "matrices",
            ...options,
          }),
        ),
      );
    return view;
  }
  const command = "ramify eval TASK --model MODEL";
  const missing = "The given paths contain no evaluations.";
  showNothing(page, "Evaluations", missing, "Create one with", command);
  return null;
}

class EvaluationView {
  constructor(evaluations, key, other, query) {
    this.evaluations = evaluations;
    this.key = key;
    this.other = other; // of the evaluation that it is compared with, or ""
    this.query = query;
    this.data = null; // until the report has arrived: a filter may be typed before
    this.items = []; // that are listed, in order
    this.queue = []; // attempts that match the filter, in the order of the items
    this.chosen = null; // the attempt whose answer is shown
    this.ticked = new Set(); // places of attempts that are labelled together
    this.sort = query.get("sort") in SORTS ? query.get("sort") : "";
    this.list = new VirtualList({
      rowHeight: ROW,
      make: makeRow,
      show: (row, index) => this.showItem(row, this.items[index]),
      label: "items and their attempts",
      role: "grid",
      rowRole: "row",
      pick: (index, event) => this.pick(this.items[index], event),
    });
    this.list.onmove = (index) => this.choose(this.items[index].listed[0]);
  }

  async start(page) {
    this.top = h("div.evaluation");
    this.bottom = h("div.evaluation");
    this.filter = new FilterInput(ATTEMPT_FIELDS, {
      label: "filter attempts",
      placeholder: "filter attempts: right, wrong, flipped, kind:…, label:none",
      changed: () => this.data && this.arrange(),
      text: this.query.get("filter") || "",
      id: "filter",
    });
    this.sorts = h(
      "select",
      {
        "aria-label": "order of the items",
        onchange: () => {
          this.sort = this.sorts.value;
          this.arrange();
        },
      },
      Object.entries(SORTS).map(([name, { words }]) =>
        h("option", { value: name, selected: name === this.sort }, words),
      ),
    );
    this.tally = h("span.quiet", { "aria-live": "polite" });
    this.chips = h("div.facets", { role: "group", "aria-label": "quick filters" });
    this.agreement = h("p.quiet.agreement", { hidden: true });
    this.card = new AnswerCard({
      said: (verdict) => this.say(verdict),
      noted: (note) => this.note(note),
    });
    this.card.element.hidden = true;
    fill(
      page,
      h(
        "div.wide",
        null,
        this.top,
        h(
          "div.wide-head",
          null,
          h("h2", null, "Attempts"),
          this.filter.input,
          this.tally,
          this.sorts,
          this.filter.fix,
          this.chips,
        ),
        this.agreement,
        h("div.matrix-beside", null, h("div.matrix", null, this.list.box), this.card.element),
        this.bottom,
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
    this.all = itemsOf(this.data);
    this.draw();
    this.arrange();
    const at = this.chosen ? placeOf(this.chosen) : this.query.get("at");
    const attempts = this.all.flatMap((item) => item.attempts);
    this.choose(attempts.find((each) => placeOf(each) === at) || this.queue[0] || null);
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
        "aria-label": "compare with",
        onchange: () =>
          (location.hash = evaluationAddress(this.key, choose.value, this.parameters())),
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
      this.top,
      h(
        "div.wide-head",
        null,
        h("h1", null, `${plan.task}/${plan.split}`),
        h("span.badge", null, plan.model),
        h(
          "span.quiet",
          null,
          `${many(plan.items, "item")}, ${many(plan.attempts, "attempt")} each${data.num_made < this.planned ? ` · ${number(data.num_made)} of ${number(this.planned)} attempts done` : ""}`,
        ),
        same.length ? choose : null,
        h("a.small", { href: "#/evaluation" }, "all evaluations"),
      ),
      h("p.quiet.file", null, data.path),
      data.problems.map((text) => h("p.problem", { role: "alert" }, text)),
      report
        ? [tiles, compared].map((panel) => panel(report, data))
        : h("p.note", null, "No attempts have been made yet."),
    );
    fill(this.bottom, report ? [kinds, rest].map((panel) => panel(report, data)) : null);
    this.drawAgreement(data.agreements);
  }

  drawAgreement(found) {
    this.agreement.hidden = !found.length;
    this.agreement.textContent = agreementWords(found);
  }

  arrange() {
    const { key } = SORTS[this.sort],
      { matches, order } = this.filter;
    for (const item of this.all) {
      item.listed = item.attempts.filter(matches);
      if (order) item.listed.sort(order);
    }
    this.items = this.all
      .filter((item) => item.listed.length)
      .map((item) => [key(item), item])
      .sort(([a, first], [b, second]) => (a < b ? -1 : a > b ? 1 : first.index - second.index))
      .map(([, item]) => item);
    // An order of attempts is also that of their items, by the first attempt of each.
    if (order) this.items.sort((a, b) => order(a.listed[0], b.listed[0]));
    this.sorts.disabled = Boolean(order);
    this.sorts.title = order ? "the filter has a sort: that decides the order" : "";
    this.queue = this.items.flatMap((item) => item.listed);
    const shown = this.filter.text.trim() ? `${number(this.queue.length)} of ` : "";
    fill(this.tally, `${shown}${number(this.data.attempts.length)}`);
    this.list.box.style.height = `${Math.min(MOST_ROWS, Math.max(1, this.items.length)) * ROW + 2}px`;
    this.drawChips();
    this.list.set(this.items.length);
    this.remember();
  }

  // What the attempts can be narrowed by, with their numbers; a second click takes it back.
  drawChips() {
    const attempts = this.data.attempts,
      kindNames = [...new Set(attempts.map((each) => each.kind))].sort();
    const offered = [
      ...Object.keys(SIGNS).map((result) => ["result", result]),
      ["flipped", "better"],
      ["flipped", "worse"],
      ["mixed", "yes"],
      ...(kindNames.length > 1 ? kindNames.slice(0, 8).map((name) => ["kind", name]) : []),
      ["label", "none"],
      ["label", "right"],
      ["label", "wrong"],
      ["label", "disputed"],
    ];
    const isLabelled = attempts.some((each) => each.verdict);
    fill(
      this.chips,
      offered.map(([field, value]) => {
        const of = ATTEMPT_FIELDS.texts[field];
        const num = attempts.filter((each) =>
          value === "none" ? !of(each) : of(each) === value,
        ).length;
        if (!num || (field === "label" && value === "none" && !isLabelled)) return null;
        const text = `${field}:${/\s/.test(value) ? `"${value}"` : value || "none"}`,
          isOn = this.filter.text.split(/\s+/).includes(text);
        const toggled = isOn
          ? this.filter.text
              .split(/\s+/)
              .filter((each) => each !== text)
              .join(" ")
          : `${this.filter.text.trim()} ${text}`.trim();
        const words = field === "result" ? `${SIGNS[value]} ${value}` : chipWords(field, value);
        return h(
          "button.small",
          {
            type: "button",
            "aria-pressed": String(isOn),
            class: field === "result" ? `chip-${TONES[value]}` : "",
            onclick: () => this.filter.set(toggled),
          },
          `${words} `,
          h("span.quiet", null, number(num)),
        );
      }),
    );
  }

  showItem(row, item) {
    const [name, squares, mean] = row.children;
    const flip = item.flipped === "better" ? "↑" : item.flipped === "worse" ? "↓" : "";
    fill(
      name,
      h("b", null, item.name),
      item.kind ? h("span.quiet", null, ` ${item.kind}`) : null,
      flip ? h("span.flip", { class: flip === "↑" ? "good" : "bad" }, ` ${flip}`) : null,
      h("span", null, ` ${oneLine(item.question, 120)}`),
    );
    name.title = [item.name, item.kind, item.flipped ? `got ${item.flipped}` : "", item.question]
      .filter(Boolean)
      .join("\n");
    squares.style.setProperty("--attempts", String(item.attempts.length));
    fill(
      squares,
      item.attempts.map((each) => this.square(each, item)),
    );
    mean.textContent = item.mean === null ? "–" : item.mean.toFixed(2);
  }

  square(each, item) {
    const result = resultOf(each),
      verdict = each.verdict;
    return h(
      "button.square",
      {
        type: "button",
        tabindex: "-1",
        "data-attempt": String(each.attempt),
        class: [
          TONES[result],
          each === this.chosen ? "chosen" : "",
          item.listed.includes(each) ? "" : "aside",
          verdict ? `labelled says-${verdict.replace(" ", "-")}` : "",
          this.ticked.has(placeOf(each)) ? "ticked" : "",
        ].join(" "),
        "aria-label": `attempt ${each.attempt + 1}: ${result}${verdict ? `, labelled ${verdict}` : ""}`,
        title: `attempt ${each.attempt + 1}: ${result}${verdict ? `\nlabelled ${verdict}` : ""}\n${oneLine(each.answer || each.error || "no answer", 200)}`,
      },
      SIGNS[result],
    );
  }

  pick(item, event) {
    const square = event?.target?.closest?.(".square");
    if (!square && event?.key === "Enter") return this.open();
    const attempt = square
      ? item.attempts.find((each) => String(each.attempt) === square.dataset.attempt)
      : item.listed[0];
    if (event?.shiftKey && square) return this.tick(attempt);
    this.choose(attempt);
  }

  choose(attempt) {
    this.chosen = attempt;
    this.card.element.hidden = !attempt;
    if (attempt) {
      const item = this.all.find((each) => each.attempts.includes(attempt));
      this.card.show(answered(attempt, item));
      this.list.setActive(this.items.indexOf(item));
    }
    this.list.draw(true);
    this.remember();
  }

  tick(attempt) {
    if (!attempt) return;
    const place = placeOf(attempt);
    if (!this.ticked.delete(place)) this.ticked.add(place);
    this.list.draw(true);
    if (this.ticked.size)
      toast(`${many(this.ticked.size, "answer")} ticked: 1, 0 or s labels all of them`);
  }

  move(step) {
    const at = this.queue.indexOf(this.chosen);
    const next = this.queue[Math.min(this.queue.length - 1, Math.max(0, at + step))];
    if (next) this.choose(next);
  }

  moveItem(step) {
    const at = this.items.findIndex((item) => item.attempts.includes(this.chosen));
    const next = this.items[Math.min(this.items.length - 1, Math.max(0, at + step))];
    if (next) this.choose(next.listed[0]);
  }

  open() {
    if (this.chosen?.run) location.hash = runAddress(this.chosen.run);
  }

  // The verdict of the answer that is shown, and on to the next one; or of all that are ticked.
  async say(verdict) {
    const stored = this.all
      .flatMap((item) => item.attempts)
      .filter((each) => (this.ticked.size ? this.ticked.has(placeOf(each)) : each === this.chosen))
      .filter((each) => each.run);
    if (!stored.length) return toast("nothing to label: the run was not stored");
    const at = this.queue.indexOf(this.chosen),
      next = this.ticked.size ? this.chosen : this.queue[at + 1] || this.chosen;
    this.ticked.clear();
    this.choose(next);
    await this.saved(
      sayVerdict(
        stored.map((each) => each.run),
        verdict,
      ),
    );
  }

  async note(text) {
    if (!this.chosen?.run) return;
    await this.saved(saveNote(this.chosen.run, text));
  }

  // Takes over what the server stored.
  async saved(request) {
    try {
      const reviews = await request;
      for (const item of this.all)
        for (const each of item.attempts) {
          const { verdict, verdicts, note } = reviews[each.run] || each;
          Object.assign(each, { verdict, verdicts, note });
        }
      if (this.chosen) this.card.drawVerdicts(this.chosen);
      this.list.draw(true);
      this.drawChips();
      if (this.data.attempts.some((each) => Object.keys(each.verdicts).length > 1))
        this.drawAgreement((await get("/api/evaluation", { key: this.key })).agreements);
    } catch (error) {
      toast(error.message);
    }
  }

  // The figures, and the attempts that match the filter.
  shared() {
    const { data, queue } = this,
      { plan, report, compared } = data,
      figure = (of) =>
        of ? `${shownFigure(of)} (${of.low.toFixed(3)} to ${of.high.toFixed(3)})` : "–";
    return {
      name: data.name,
      title: `${plan.task}/${plan.split} · ${plan.model}`,
      parts: [
        { text: `${many(plan.items, "item")}, ${many(plan.attempts, "attempt")} each` },
        ...(compared ? [{ text: comparedWords(data) }] : []),
        ...(report
          ? [
              {
                table: {
                  head: ["kind", "items", "mean reward", `pass@${report.k}`],
                  rows: report.rows.map((row) => [
                    row.kind || "(no kind)",
                    number(row.items),
                    figure(row.average),
                    figure(row.passes),
                  ]),
                },
              },
            ]
          : []),
        { heading: many(queue.length, "attempt") },
        { table: { head: ATTEMPT_HEAD, rows: queue.map(attemptTexts) } },
      ],
    };
  }

  parameters() {
    const query = new URLSearchParams();
    if (this.filter.text.trim()) query.set("filter", this.filter.text.trim());
    if (this.sort) query.set("sort", this.sort);
    if (this.chosen) query.set("at", placeOf(this.chosen));
    return query.toString();
  }

  remember() {
    history.replaceState(null, "", evaluationAddress(this.key, this.other, this.parameters()));
  }

  keys() {
    return {
      j: ["next item", () => this.moveItem(1)],
      k: ["previous item", () => this.moveItem(-1)],
      ArrowRight: ["next attempt", () => this.move(1)],
      ArrowLeft: ["previous attempt", () => this.move(-1)],
      Enter: ["open the run", () => this.open()],
      x: ["tick the attempt, to label several at once", () => this.tick(this.chosen)],
      ...this.card.keys(),
      "/": ["filter attempts", () => this.filter.focus()],
    };
  }
}

function chipWords(field, value) {
  if (field === "mixed") return "attempts differ";
  if (field === "flipped") return value === "better" ? "flipped to right" : "flipped to wrong";
  if (field === "label") return value === "none" ? "not labelled" : `labelled ${value}`;
  return `${field}:${value || "none"}`;
}

// The attempts of each item; all of them say whether the item flipped, or is mixed.
function itemsOf({ attempts, flips }) {
  const items = new Map();
  for (const each of attempts) {
    if (!items.has(each.item))
      items.set(each.item, { name: each.item, index: items.size, kind: each.kind, attempts: [] });
    items.get(each.item).attempts.push(each);
  }
  for (const item of items.values()) {
    const scored = item.attempts.filter((each) => each.reward !== null);
    item.mean = scored.length
      ? scored.reduce((sum, each) => sum + each.reward, 0) / scored.length
      : null;
    item.question = item.attempts.find((each) => each.question)?.question || "";
    item.cost = item.attempts.reduce((sum, each) => sum + (each.cost || 0), 0);
    item.flipped = flips[item.name] || "";
    item.listed = item.attempts;
    const isMixed = new Set(scored.map((each) => each.right)).size > 1;
    for (const each of item.attempts)
      Object.assign(each, { flipped: item.flipped, mixed: isMixed });
  }
  return [...items.values()];
}

const ATTEMPT_HEAD = [
  ...["item", "attempt", "kind", "result", "reward", "question", "expected", "answer"],
  ...["error", "ended", "tokens", "cost", "seconds", "label", "note"],
];

// An attempt as a row below `ATTEMPT_HEAD`.
function attemptTexts(each) {
  return [
    each.item,
    String(each.attempt + 1),
    each.kind,
    resultOf(each),
    each.reward === null ? "" : number(each.reward),
    each.question,
    each.expected,
    each.answer,
    each.error,
    stopWords(each.stop)[0],
    String(each.tokens),
    each.cost === null ? "" : dollars(each.cost),
    seconds(each.seconds),
    each.verdict || "",
    each.note,
  ];
}

function placeOf(attempt) {
  return `${attempt.item}/${attempt.attempt + 1}`;
}

// What the card shows of an attempt.
/** @returns {import("./verdicts.js").Answered} */
function answered(attempt, item) {
  const result = resultOf(attempt);
  return {
    ...attempt,
    title: `${attempt.item} · attempt ${attempt.attempt + 1} of ${item.attempts.length}`,
    outcome: [`${SIGNS[result]} ${result}`, TONES[result]],
    siblings: item.attempts
      .filter((each) => each !== attempt && each.run)
      .map((each) => ({
        run: each.run,
        name: `attempt ${each.attempt + 1} ${SIGNS[resultOf(each)]}`,
        differs: resultOf(each) !== result,
      })),
  };
}

// --- panels ------------------------------------------------------------------------------------

// A panel receives the report and what the server sent with it, and gives elements, or null if it
// has nothing to show.

function tiles(report) {
  const all = report.rows[0],
    spent = report.spent,
    tile = (name, value, figure) =>
      h(
        "div.tile",
        null,
        h("dt", null, name),
        h("dd", null, value, figure ? interval(figure) : null),
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
      "per attempt",
      `${seconds(spent.seconds_mean)}, ${number(spent.turns_mean)} turns, ${number(spent.calls_mean)} calls below the root`,
    ),
  );
}

function compared(_, data) {
  if (!data.compared) return null;
  return data.compared.problem
    ? h("p.problem", null, data.compared.problem)
    : h("p.parting", { role: "note" }, comparedWords(data));
}

function comparedWords(data) {
  const found = data.compared;
  if (found.problem) return found.problem;
  const { value, low, high } = found.difference,
    sure = low > 0 || high < 0,
    flipped = (way) => Object.values(data.flips).filter((each) => each === way).length;
  return `${value >= 0 ? "+" : ""}${value.toFixed(3)} [${low.toFixed(3)} ${high.toFixed(3)}] compared with ${found.name}, over ${many(found.items, "item")}: ${sure ? (value > 0 ? "better" : "worse") : "no significant difference"}; ${number(flipped("better"))} got better and ${number(flipped("worse"))} got worse.`;
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
      cell: ([, value]) => [h("span.num", null, shownFigure(value)), bar(value)],
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
          `${many(report.failed, "attempt")} failed and ${report.failed === 1 ? "is" : "are"} excluded; first error: ${report.first_error}`,
        )
      : null,
  ];
}

function shownFigure({ value }) {
  return value.toFixed(3);
}

function interval({ low, high }) {
  return h(
    "small.quiet",
    { title: "95 % interval" },
    low === high ? "" : `${low.toFixed(3)} to ${high.toFixed(3)}`,
  );
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

function makeRow() {
  return h(
    "div.matrix-row",
    null,
    h("span.item-name", { role: "rowheader" }),
    h("span.squares", { role: "gridcell" }),
    h("span.num", { role: "gridcell" }),
  );
}
