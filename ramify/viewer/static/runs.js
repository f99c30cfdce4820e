// The list of runs, with filter and sorting; of thousands of rows only visible ones are elements.

import { fill, h, toast } from "./dom.js";
import { FilterInput, firstDown } from "./filter.js";
import {
  count,
  dollars,
  grouped,
  moment,
  number,
  oneLine,
  runAddress,
  seconds,
  stopWords,
} from "./format.js";
import { VirtualList } from "./list.js";
import { facets, folds, percentiles, quotedValue, RUN_FIELDS } from "./run_fields.js";
import { listPlaces } from "./run_list.js";
import { worthTone } from "./story.js";
import { sayVerdict, verdictKeys } from "./verdicts.js";

const MAX_RUNS = 8; // that are compared, as in viewer/run_comparison.py
const EVERY_MS = 2000; // between updates
const SCROLL_MS = 150; // after scrolling, before the address says where
// updates of a long list are rarer: they take at most one part in so many of the time
const SHARE = 20;
const NARROW = matchMedia("(max-width: 800px)");

// Names of columns are fields of the filter.
/** @type {{ name: string, isNumber?: boolean, text: (run: any) => string }[]} */
const COLUMNS = [
  { name: "when", text: (run) => moment(run.started_at) },
  { name: "question", text: questionWords },
  { name: "answer", text: answerWords },
  { name: "model", text: (run) => run.model || "" },
  { name: "calls", isNumber: true, text: (run) => count(run.num_calls || 0) },
  { name: "tokens", isNumber: true, text: (run) => count(run.tokens || 0) },
  { name: "cost", isNumber: true, text: (run) => dollars(run.cost) },
  { name: "seconds", isNumber: true, text: (run) => seconds(run.seconds || 0) },
  { name: "stop", text: (run) => standing(run)[0] },
  { name: "reward", isNumber: true, text: rewardWords },
];

function questionWords(run) {
  if (run.problem) return shortened(run);
  const labels = (run.labels || []).map((label) => `[${label}] `).join("");
  return `${labels}${oneLine(run.question || run.id, 300)}`;
}

function rewardWords(run) {
  if (run.reward === undefined || run.reward === null) return "";
  const sign = run.reward >= 1 ? " ✓" : run.reward <= 0 ? " ✗" : "";
  return `${number(run.reward)}${sign}${run.corrected ? "*" : ""}`;
}

function standing(run) {
  return run.problem ? ["unreadable", "bad"] : stopWords(run.stop, run.alive);
}

// The answer, and the reason if the run did not end with a final one.
function answerWords(run) {
  if (run.problem) return "";
  const answer =
    run.answer === undefined || run.answer === null ? "" : oneLine(run.answer, 160) || "(empty)";
  return run.stop === "final" ? answer : [answer, run.ending].filter(Boolean).join(" — ") || "";
}

// A problem without the folder of its file, which the row's title shows.
function shortened(run) {
  const name = (run.source || "").split("/").pop() || run.id;
  return run.problem.slice(Math.max(0, run.problem.indexOf(name)));
}

// The address of the list with a filter, scrolled so that the run `top` is the first in sight.
function runsAddress(filter, top = "") {
  const words = filter.trim();
  if (!words && !top) return "#/";
  return `#/runs/${encodeURIComponent(words)}${top ? `/at/${encodeURIComponent(top)}` : ""}`;
}

export async function runsPage(page, [filter = "", at = "", top = ""] = []) {
  const view = new RunsView(filter);
  await view.start(page, at === "at" ? top : "");
  return view;
}

class RunsView {
  constructor(filter) {
    this.filter = new FilterInput(RUN_FIELDS, {
      label: "filter runs",
      placeholder: "words, or when:today stop:error cost>0.1 sort:cost",
      changed: () => this.filtered(),
      text: filter,
      id: "filter",
    });
    this.ticked = new Set(); // keys of the runs to compare
    this.shown = []; // runs, and rows that stand for many
    this.list = new VirtualList({
      rowHeight: NARROW.matches ? 76 : 36,
      make,
      show: (row, index) => this.show(row, index),
      pick: (index, event) => {
        const run = this.shown[index];
        if (event?.target.closest?.(".when") && !run.group) return this.tick(run);
        this.rememberPlace();
        location.hash = run.group ? this.groupAddress(run.group) : runAddress(run.key);
      },
      label: "runs",
    });
    this.list.onmove = () => {};
    this.scrolled = () => {
      clearTimeout(this.scrolling);
      this.scrolling = setTimeout(() => this.rememberPlace(), SCROLL_MS);
    };
    this.list.box.addEventListener("scroll", this.scrolled, { passive: true });
    this.resized = () => {
      this.list.setRowHeight(NARROW.matches ? 76 : 36);
    };
    NARROW.addEventListener("change", this.resized);
  }

  async start(page, top) {
    this.facets = h("div.facets", { role: "group", "aria-label": "quick filters" });
    this.figures = h("p.quiet.figures-line");
    this.groups = h(
      "select",
      { "aria-label": "group by", onchange: () => this.setGroup(this.groups.value) },
      ["", ...RUN_FIELDS.groups].map((name) =>
        h("option", { value: name }, name ? `by ${name}` : "not grouped"),
      ),
    );
    this.compare = h(
      "button.small",
      { type: "button", hidden: true, onclick: () => this.compareTicked() },
      "compare",
    );
    this.label = h("a.small.label-these", { href: "#/label" }, "label these");
    this.tally = h("span.quiet", { "aria-live": "polite" });
    this.problems = h("div.runs-problems");
    this.heads = COLUMNS.map(({ name, isNumber }) =>
      h(
        `button.${classOf(name)}`,
        { type: "button", class: isNumber ? "num" : "", onclick: () => this.sortBy(name) },
        name,
      ),
    );
    this.none = h("div.empty", { hidden: true });
    this.body = h(
      "div.table",
      null,
      h("div.thead.cols", { role: "group", "aria-label": "sort by" }, this.heads),
      this.list.box,
    );
    document.title = "Runs · Ramify";
    await this.load();
    fill(
      page,
      h(
        "div.runs",
        null,
        h(
          "div.runs-head",
          null,
          h("h1", null, "Runs"),
          this.filter.input,
          this.tally,
          this.groups,
          this.compare,
          this.label,
          this.figures,
          this.filter.fix,
          this.facets,
        ),
        this.problems,
        this.none,
        this.body,
      ),
    );
    this.arrange();
    this.restorePlace(top, history.state?.active);
    this.again();
  }

  // Scroll to the run `top`, and mark the run `active`, if they are still listed.
  restorePlace(top, active) {
    const indexOf = (key) => (key ? this.shown.findIndex((run) => run.key === key) : -1),
      index = indexOf(top);
    if (index > 0) this.list.box.scrollTop = index * this.list.rowHeight;
    this.list.setActive(indexOf(active), false);
  }

  // Where the list is scrolled to is part of the address, and which row is marked is beside it, so
  // that both come back.
  rememberPlace() {
    clearTimeout(this.scrolling);
    if (this.closed) return;
    const top = this.shown[Math.round(this.list.box.scrollTop / this.list.rowHeight)],
      active = this.shown[this.list.active]?.key,
      address = runsAddress(this.filter.text, this.list.box.scrollTop > 0 && top ? top.key : "");
    history.replaceState({ active }, "", address);
  }

  // The next update; a list of thousands of runs takes a while.
  again() {
    this.timer = setTimeout(
      async () => {
        if (!document.hidden)
          await this.load().then(
            () => this.closed || this.update(),
            () => {},
          );
        if (!this.closed) this.again();
      },
      Math.max(EVERY_MS, SHARE * this.took),
    );
  }

  // A filter by time can select other runs although none changed.
  update() {
    const isTimed = /when[:=<>]/i.test(this.filter.text);
    if (!this.data.changed && !isTimed) return;
    if (isTimed) this.filter.read();
    const active = this.shown[this.list.active]?.key,
      first = Math.floor(this.list.box.scrollTop / this.list.rowHeight),
      top = first ? this.shown[first]?.key : "",
      beyond = this.list.box.scrollTop - first * this.list.rowHeight;
    this.arrange();
    this.restorePlace(top, active);
    if (top) this.list.box.scrollTop += beyond;
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    clearTimeout(this.scrolling);
    this.list.close();
    NARROW.removeEventListener("change", this.resized);
  }

  // Filter, groups and order are part of the address, so that they can be shared and come back.
  filtered() {
    history.replaceState(null, "", runsAddress(this.filter.text));
    this.list.box.scrollTop = 0;
    this.list.setActive(-1);
    this.arrange();
  }

  // The rows that are listed.
  shared() {
    const filter = this.filter.text.trim(),
      rows = this.shown.map((run) => [...COLUMNS.map(({ text }) => text(run)), run.id || ""]);
    return {
      name: "runs",
      title: filter ? `Runs: ${filter}` : "Runs",
      parts: [
        { text: `${this.tally.textContent}\n${this.figures.textContent}`.trim() },
        { table: { head: [...COLUMNS.map(({ name }) => name), "id"], rows } },
      ],
    };
  }

  setGroup(name) {
    this.filter.set(`${this.ungrouped()} ${name ? `group:${name}` : ""}`.trim());
  }

  // The address of the runs that a row stands for.
  groupAddress(part) {
    return runsAddress(`${this.ungrouped()} ${part}`);
  }

  ungrouped() {
    return this.filter.text.replace(/(^|\s)group:\S*/gi, "").trim();
  }

  tick(run) {
    if (run.group) return;
    if (!this.ticked.delete(run.key)) this.ticked.add(run.key);
    this.drawTicked();
  }

  drawTicked() {
    this.compare.hidden = this.ticked.size < 2 || this.ticked.size > MAX_RUNS;
    this.compare.textContent =
      this.ticked.size === 2 ? "compare these two" : `compare these ${this.ticked.size}`;
    this.list.later(true);
  }

  // Label all runs that are ticked.
  async labelTicked(verdict) {
    const keys = [...this.ticked];
    if (!keys.length)
      return toast(
        "tick runs with x to label them, or click “label these” to go through all of them",
      );
    this.ticked.clear();
    this.drawTicked();
    try {
      await sayVerdict(keys, verdict);
      await this.load();
      if (!this.closed) this.update();
    } catch (error) {
      toast(error.message);
    }
  }

  compareTicked() {
    location.hash = `#/compare/${[...this.ticked].map(encodeURIComponent).join("/")}`;
  }

  drawFigures() {
    const runs = this.shown,
      cost = percentiles(runs.map((run) => run.cost)),
      time = percentiles(runs.filter((run) => run.stop).map((run) => run.seconds || 0));
    const rewards = runs.map((run) => run.reward).filter((reward) => typeof reward === "number");
    fill(
      this.figures,
      [
        cost ? `cost: median ${dollars(cost[0])}, 90th percentile ${dollars(cost[1])}` : "",
        time ? `time: median ${seconds(time[0])}, 90th percentile ${seconds(time[1])}` : "",
        rewards.length
          ? `mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}`
          : "",
      ]
        .filter(Boolean)
        .join(" · "),
    );
    const chips = facets(runs);
    fill(
      this.facets,
      chips.map(([field, value, count]) =>
        h(
          "button.small",
          {
            type: "button",
            onclick: () =>
              this.filter.set(`${this.filter.text.trim()} ${field}:${quotedValue(value)}`.trim()),
          },
          `${field}:${value || "none"} `,
          h("span.quiet", null, grouped(count)),
        ),
      ),
    );
  }

  async load() {
    const start = performance.now();
    this.data = await listPlaces();
    this.took = performance.now() - start;
  }

  sortBy(name) {
    const { name: by, down } = this.order();
    this.filter.setSort(name, by === name ? !down : firstDown(RUN_FIELDS, name));
  }

  // The field that the list is sorted by.
  order() {
    return this.filter.sort || { name: "when", down: true };
  }

  arrange() {
    const { matches, group, order, narrows, problem } = this.filter,
      { name: by, down } = this.order();
    this.shown = this.data.runs.filter(matches);
    if (order) this.shown.sort(order);
    for (const [index, head] of this.heads.entries()) {
      const { name } = COLUMNS[index],
        isSorted = name === by;
      head.dataset.sort = isSorted ? (down ? "descending" : "ascending") : "none";
      head.setAttribute("aria-pressed", String(isSorted));
      head.textContent = `${name}${isSorted ? (down ? " ↓" : " ↑") : ""}`;
    }
    const total = this.data.runs.length,
      num = this.shown.length;
    this.drawFigures();
    if (group) this.shown = this.grouped(this.shown, group);
    else if (!narrows && !order && !problem) this.fold();
    const filter = this.ungrouped();
    this.label.hidden = !num;
    this.label.setAttribute("href", filter ? `#/label/${encodeURIComponent(filter)}` : "#/label");
    this.groups.value = group ? group.name : "";
    fill(this.tally, narrows || problem ? `${grouped(num)} of ${grouped(total)}` : grouped(total));
    const said = JSON.stringify(this.data.problems);
    if (said !== this.said)
      fill(
        this.problems,
        this.data.problems.map((each) =>
          h(
            "p.problem",
            null,
            each.text.includes(each.path) ? each.text : `${each.path} ${each.text}`,
          ),
        ),
      );
    this.said = said;
    this.none.hidden = num > 0;
    this.body.hidden = !num;
    if (!total) this.sayNone();
    else if (!num) this.sayNoMatch();
    this.list.set(this.shown.length);
  }

  // What a person asked comes first; evaluations and rollouts are one row each.
  fold() {
    const found = folds(this.shown);
    if (found)
      this.shown = [
        ...found.asked,
        ...found.made.map(({ runs, words, filter }) => rowOfMany(filter, words, runs)),
      ];
  }

  sayNoMatch() {
    fill(
      this.none,
      h("p", null, this.filter.problem ? "The filter cannot be read." : "No runs match."),
      h("button.small", { type: "button", onclick: () => this.filter.set("") }, "show all runs"),
    );
  }

  // Rows in groups: a row for each value, with its number of runs and its median figures, before
  // its runs.
  grouped(runs, { name, of }) {
    const groups = new Map();
    for (const run of runs) {
      const value = String(of(run)).replaceAll("\n", ", ");
      if (!groups.has(value)) groups.set(value, []);
      groups.get(value).push(run);
    }
    return [...groups]
      .sort((a, b) => b[1].length - a[1].length)
      .flatMap(([value, members]) => [
        rowOfMany(`${name}:${quotedValue(value)}`, value || `no ${name}`, members),
        ...members,
      ]);
  }

  sayNone() {
    const trainings = this.data.trainings.length;
    fill(
      this.none,
      h("p", null, `No runs yet in ${this.data.places.join(", ")}.`),
      h("p", null, "Create one with ", h("code", null, "ramify ask QUESTION PATH…")),
      trainings
        ? h(
            "p",
            null,
            h(
              "a",
              { href: "#/training" },
              `${trainings} training run${trainings === 1 ? "" : "s"}`,
            ),
          )
        : null,
    );
  }

  show(row, index) {
    const run = this.shown[index],
      cells = row.children;
    row.classList.toggle("group-row", Boolean(run.group));
    row.classList.toggle("ticked", this.ticked.has(run.key));
    for (const [at, column] of COLUMNS.entries()) {
      const { name } = column,
        text = column.text(run);
      if (cells[at].textContent !== text) cells[at].textContent = text;
      if (name === "stop") cells[at].className = `stop mark ${standing(run)[1]}`;
      if (name === "reward" && text) cells[at].className = `reward num ${worthTone(run.reward)}`;
      if (name === "question") cells[at].classList.toggle("bad", Boolean(run.problem));
    }
    row.title =
      run.problem ||
      [
        run.question,
        run.answer,
        run.ending,
        (run.labels || []).join(", "),
        run.note,
        run.corrected ? `corrected: ${JSON.stringify(run.corrected)}` : "",
        run.id,
      ]
        .filter(Boolean)
        .join("\n");
  }

  keys() {
    return {
      j: ["next run", () => this.move(1)],
      k: ["previous run", () => this.move(-1)],
      x: [
        "tick the run, to compare or label it",
        () => this.list.active >= 0 && this.tick(this.shown[this.list.active]),
      ],
      Enter: ["open the run", () => this.list.active >= 0 && this.list.choose(this.list.active)],
      ...verdictKeys("label the ticked runs:", (verdict) => this.labelTicked(verdict)),
      "/": ["filter", () => this.filter.focus()],
    };
  }

  move(step) {
    this.list.setActive(Math.min(this.shown.length - 1, Math.max(0, this.list.active + step)));
  }
}

// A row that stands for many runs: its figures are medians, its reward is the mean, its time is the
// latest. A click filters by `part`.
function rowOfMany(part, words, runs) {
  const median = (values) => percentiles(values)?.[0],
    rewards = runs.map((run) => run.reward).filter((reward) => typeof reward === "number");
  return {
    key: `group ${part}`,
    group: part,
    started_at: runs.reduce((latest, run) => Math.max(latest, run.started_at), 0),
    question: `${words} · ${grouped(runs.length)} run${runs.length === 1 ? "" : "s"}`,
    num_calls: median(runs.map((run) => run.num_calls || 0)),
    tokens: median(runs.map((run) => run.tokens || 0)),
    cost: median(runs.map((run) => run.cost)) ?? null,
    seconds: median(runs.map((run) => run.seconds || 0)),
    stop: "medians",
    reward: rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : undefined,
  };
}

// "answer" is the class of an answer in a transcript.
function classOf(column) {
  return column === "answer" ? "run-answer" : column;
}

function make() {
  return h(
    "div.run-row.cols",
    null,
    COLUMNS.map(({ name, isNumber }) =>
      h(`span.${classOf(name)}`, { class: isNumber ? "num" : "" }),
    ),
  );
}
