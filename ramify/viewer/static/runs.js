// The list of runs, with filter and sorting; of thousands of rows only visible ones are elements.

import { get } from "./api.js";
import { fill, h, toast } from "./dom.js";
import { FilterInput } from "./filter.js";
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
import { facets, percentiles, RUN_FIELDS } from "./run_fields.js";
import { worthTone } from "./story.js";

const MAX_RUNS = 8; // that are compared, as in viewer/comparison.py
const EVERY_MS = 2000; // between updates
// updates of a long list are rarer: they take at most one part in so many of the time
const SHARE = 20;
const NARROW = matchMedia("(max-width: 800px)");

/** @type {{ name: string, isNumber?: boolean, key: (run: any) => any, text: (run: any) => string }[]} */
const COLUMNS = [
  { name: "when", key: (run) => run.started_at || 0, text: (run) => moment(run.started_at) },
  { name: "question", key: (run) => (run.question || "").toLowerCase(), text: questionWords },
  { name: "answer", key: (run) => (run.answer || "").toLowerCase(), text: answerWords },
  { name: "model", key: (run) => run.model || "", text: (run) => run.model || "" },
  {
    name: "calls",
    isNumber: true,
    key: (run) => run.num_calls || 0,
    text: (run) => count(run.num_calls || 0),
  },
  {
    name: "tokens",
    isNumber: true,
    key: (run) => run.tokens || 0,
    text: (run) => count(run.tokens || 0),
  },
  { name: "cost", isNumber: true, key: (run) => run.cost ?? -1, text: (run) => dollars(run.cost) },
  {
    name: "seconds",
    isNumber: true,
    key: (run) => run.seconds || 0,
    text: (run) => seconds(run.seconds || 0),
  },
  { name: "stop", key: (run) => standing(run)[0], text: (run) => standing(run)[0] },
  { name: "reward", isNumber: true, key: (run) => run.reward ?? -1e9, text: rewardWords },
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

export async function runsPage(page, [filter = ""] = []) {
  const view = new RunsView(filter);
  await view.start(page);
  return view;
}

class RunsView {
  constructor(filter) {
    this.filter = new FilterInput(RUN_FIELDS, {
      label: "filter runs",
      placeholder: "words, or cost>0.1 stop:error model:qwen reward:0",
      changed: () => this.filtered(),
      text: filter,
      id: "filter",
    });
    this.ticked = new Set(); // keys of the runs to compare
    this.by = "when";
    this.down = true;
    this.shown = [];
    this.list = new VirtualList({
      rowHeight: NARROW.matches ? 76 : 36,
      make,
      show: (row, index) => this.show(row, index),
      pick: (index, event) => {
        if (event?.target.closest?.(".when")) this.tick(this.shown[index]);
        else if (this.shown[index].group) this.openGroup(this.shown[index].group);
        else location.hash = runAddress(this.shown[index].key);
      },
      label: "runs",
    });
    this.list.onmove = () => {};
    this.resized = () => {
      this.list.setRowHeight(NARROW.matches ? 76 : 36);
    };
    NARROW.addEventListener("change", this.resized);
  }

  async start(page) {
    this.facets = h("div.facets", { role: "group", "aria-label": "narrow by" });
    this.figures = h("p.quiet.figures-line");
    this.groups = h(
      "select",
      { "aria-label": "group by", onchange: () => this.setGroup(this.groups.value) },
      ["", ...RUN_FIELDS.groups].map((name) =>
        h("option", { value: name }, name ? `by ${name}` : "no groups"),
      ),
    );
    this.compare = h(
      "button.small",
      { type: "button", hidden: true, onclick: () => this.compareTicked() },
      "compare",
    );
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
    this.again();
  }

  // The next update; a list of thousands of runs takes a while.
  again() {
    this.timer = setTimeout(
      async () => {
        if (!document.hidden)
          await this.load().then(
            () => this.closed || this.arrange(),
            () => {},
          );
        if (!this.closed) this.again();
      },
      Math.max(EVERY_MS, SHARE * this.took),
    );
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.list.close();
    NARROW.removeEventListener("change", this.resized);
  }

  // The filter is part of the address, so that it can be shared and reloaded.
  filtered() {
    const { text } = this.filter;
    history.replaceState(null, "", text.trim() ? `#/runs/${encodeURIComponent(text)}` : "#/");
    this.arrange();
  }

  setGroup(name) {
    this.filter.set(`${this.ungrouped()} ${name ? `group:${name}` : ""}`.trim());
  }

  openGroup(part) {
    this.filter.set(`${this.ungrouped()} ${part}`.trim());
  }

  ungrouped() {
    return this.filter.text.replace(/(^|\s)group:\S*/gi, "").trim();
  }

  tick(run) {
    if (run.group) return;
    if (!this.ticked.delete(run.key)) {
      if (this.ticked.size === MAX_RUNS) return toast(`at most ${MAX_RUNS} runs are compared`);
      this.ticked.add(run.key);
    }
    this.compare.hidden = this.ticked.size < 2;
    this.compare.textContent =
      this.ticked.size === 2 ? "compare these two" : `compare these ${this.ticked.size}`;
    this.list.later(true);
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
        cost ? `cost: median ${dollars(cost[0])}, 90 % below ${dollars(cost[1])}` : "",
        time ? `time: median ${seconds(time[0])}, 90 % below ${seconds(time[1])}` : "",
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
              this.filter.set(`${this.filter.text.trim()} ${field}:${quoted(value)}`.trim()),
          },
          `${field}:${value || "none"} `,
          h("span.quiet", null, grouped(count)),
        ),
      ),
    );
  }

  async load() {
    const start = performance.now();
    this.data = await get("/api/runs");
    this.took = performance.now() - start;
  }

  sortBy(name) {
    const { isNumber } = COLUMNS.find((column) => column.name === name);
    this.down = this.by === name ? !this.down : isNumber || name === "when";
    this.by = name;
    this.arrange();
  }

  arrange() {
    const { matches, group } = this.filter,
      words = this.filter.text.trim();
    const value = COLUMNS.find((column) => column.name === this.by).key,
      sign = this.down ? -1 : 1;
    this.shown = this.data.runs
      .filter(matches)
      .map((run) => [value(run), run])
      .sort((a, b) => (a[0] < b[0] ? -sign : a[0] > b[0] ? sign : 0))
      .map(([, run]) => run);
    for (const [index, head] of this.heads.entries()) {
      const { name } = COLUMNS[index],
        isSorted = name === this.by;
      head.dataset.sort = isSorted ? (this.down ? "descending" : "ascending") : "none";
      head.setAttribute("aria-pressed", String(isSorted));
      head.textContent = `${name}${isSorted ? (this.down ? " ↓" : " ↑") : ""}`;
    }
    const total = this.data.runs.length,
      num = this.shown.length;
    this.drawFigures();
    if (group) this.shown = this.grouped(this.shown, group);
    this.groups.value = group ? group.name : "";
    fill(this.tally, words ? `${grouped(num)} of ${grouped(total)}` : grouped(total));
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
    this.none.hidden = total > 0;
    this.body.hidden = !total;
    if (!total) this.sayNone();
    this.list.set(this.shown.length);
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
      .flatMap(([value, members]) => [groupRow(name, value, members), ...members]);
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
        "tick the run, to compare it",
        () => this.list.active >= 0 && this.tick(this.shown[this.list.active]),
      ],
      Enter: ["open the run", () => this.list.active >= 0 && this.list.choose(this.list.active)],
      "/": ["filter", () => this.filter.focus()],
    };
  }

  move(step) {
    this.list.setActive(Math.min(this.shown.length - 1, Math.max(0, this.list.active + step)));
  }
}

// A value as a part of the filter.
function quoted(value) {
  return /\s/.test(value) ? `"${value.replaceAll('"', "")}"` : value || "none";
}

// A row that stands for many runs: its figures are medians, its reward is the mean. A click filters
// by it.
function groupRow(name, value, runs) {
  const median = (values) => percentiles(values)?.[0],
    rewards = runs.map((run) => run.reward).filter((reward) => typeof reward === "number");
  return {
    key: `group ${value}`,
    group: `${name}:${quoted(value)}`,
    question: `${value || `no ${name}`} · ${grouped(runs.length)} run${runs.length === 1 ? "" : "s"}`,
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
