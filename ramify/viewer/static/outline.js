// The calls of a run as a list, each parent before its children. Many plain sub-calls of one cell
// form one row until it is opened. Only visible rows are elements.

import { fill, h } from "./dom.js";
import { FilterInput } from "./filter.js";
import { count, dollars, grouped, oneLine, seconds, stopWords } from "./format.js";
import { VirtualList } from "./list.js";

const PLACEHOLDER = "filter calls";
const SORTS = [
  ["cost", "cost"],
  ["time", "seconds"],
  ["tokens", "tokens"],
]; // [words, field of the filter]
const TOGETHER = 8; // maximum plain sub-calls of one cell with separate rows
const TWO_LINES = matchMedia("(max-width: 1300px)"); // a row's question above its answer
const ROW_PIXELS = () => (TWO_LINES.matches ? 46 : 30);

// What calls can be filtered by.
/** @returns {import("./filter.js").Fields} */
export function callFields(run) {
  const stopOf = (call) => call.stop || (run.alive ? "running" : "interrupted");
  return {
    numbers: {
      cost: (call) => call.cost,
      tokens: (call) => call.tokens_in + call.tokens_out,
      seconds: (call) => (call.ended_s ?? run.now()) - call.started_s,
      depth: (call) => call.depth,
      turns: (call) => call.turns,
      reward: (call) => call.reward,
    },
    texts: {
      stop: stopOf,
      kind: (call) => call.kind,
      model: (call) => call.model,
      question: (call) => call.question,
      answer: (call) => call.answer,
      error: (call) => call.error,
      differs: (call) => call.outlier,
      id: (call) => call.id,
    },
    words: (call) =>
      `${call.id} ${call.kind} ${call.model} ${stopWords(call.stop, run.alive)[0]} ${call.outlier} ${call.question} ${call.answer} ${call.error}`,
  };
}

export class Outline {
  // run: the page's model; pick(index) is called when the user chooses a call.
  constructor(run, pick) {
    this.run = run;
    this.pick = pick;
    this.rows = []; // { call } or { group: [calls], key }
    this.open = new Set();
    this.filter = new FilterInput(callFields(run), {
      label: "filter calls",
      placeholder: PLACEHOLDER,
      changed: () => {
        this.only = null;
        this.changed(true);
      },
    });
    this.only = null; // Set of the only calls to show, or null
    this.list = new VirtualList({
      rowHeight: ROW_PIXELS(),
      make,
      show: (row, index) => this.show(row, index),
      pick: (index) => this.chosen(index),
      label: "calls",
      role: "tree",
      rowRole: "treeitem",
    });
    this.tally = h("span.quiet.tally");
    this.back = h(
      "button.small",
      { type: "button", hidden: true, onclick: () => this.showAll() },
      "all calls",
    );
    this.sorts = SORTS.map(([words, field]) =>
      h(
        "button.small.sort",
        { type: "button", title: `sort by ${words}`, onclick: () => this.sortBy(field) },
        words,
      ),
    );
    this.element = h(
      "section.outline",
      { "aria-label": "calls" },
      h(
        "div.outline-head",
        null,
        this.filter.input,
        this.tally,
        this.back,
        h("div.sorts", { role: "group", "aria-label": "sort calls by" }, this.sorts),
      ),
      this.filter.fix,
      this.list.box,
    );
    this.children = new Map();
    this.known = 0;
    this.resized = () => this.list.setRowHeight(ROW_PIXELS());
    TWO_LINES.addEventListener("change", this.resized);
  }

  close() {
    TWO_LINES.removeEventListener("change", this.resized);
    this.list.close();
  }

  // Rows are rebuilt if there are new calls, otherwise only redrawn.
  changed(all = false) {
    if (this.run.calls.length === this.known && !all) return this.list.later(true);
    this.known = this.run.calls.length;
    this.children = new Map(); // only of calls with children
    const roots = [];
    this.run.calls.forEach((call, index) => {
      const siblings = call.parent < 0 ? roots : this.children.get(call.parent);
      if (siblings) siblings.push(index);
      else this.children.set(call.parent, [index]);
    });
    this.rows = [];
    if (this.narrowed()) this.addMatches();
    else this.add(roots);
    this.list.set(this.rows.length);
    this.back.hidden = !this.only;
    for (const [at, [words, field]] of SORTS.entries()) {
      const sort = this.filter.sort?.name === field ? this.filter.sort : null;
      this.sorts[at].setAttribute("aria-pressed", String(Boolean(sort)));
      this.sorts[at].textContent = `${words}${sort ? (sort.down ? " ↓" : " ↑") : ""}`;
    }
    this.markSelected(false);
    const isPart = this.only || this.filter.narrows || this.filter.problem,
      shown = isPart ? `${grouped(this.rows.length)} of ` : "";
    fill(this.tally, `${shown}${grouped(this.run.calls.length)}`);
  }

  add(indices) {
    const stack = [...indices].reverse();
    while (stack.length) {
      const index = stack.pop();
      if (Array.isArray(index)) {
        this.rows.push({ group: index, key: groupKey(this.run.calls[index[0]]) });
        continue;
      }
      this.rows.push({ call: index });
      const below = this.children.get(index);
      if (below) for (const each of this.grouped(below).reverse()) stack.push(each);
    }
  }

  // Consecutive plain calls of one cell become one entry, unless it is open.
  grouped(indices) {
    const found = [];
    let run = [];
    const flush = () => {
      const shut = run.length > TOGETHER && !this.open.has(groupKey(this.run.calls[run[0]]));
      if (shut) found.push(run);
      else for (const each of run) found.push(each);
      run = [];
    };
    for (const index of indices) {
      const call = this.run.calls[index],
        first = run.length ? this.run.calls[run[0]] : null;
      const plain = call.kind !== "rlm" && !this.children.has(index);
      if (first && (!plain || first.turn !== call.turn || first.cell !== call.cell)) flush();
      if (plain) run.push(index);
      else found.push(index);
    }
    flush();
    return found;
  }

  addMatches() {
    this.run.calls.forEach((call, index) => {
      if (this.only ? this.only.has(index) : this.filter.matches(call))
        this.rows.push({ call: index });
    });
    const { order } = this.filter,
      { calls } = this.run;
    if (order && !this.only) this.rows.sort((a, b) => order(calls[a.call], calls[b.call]));
  }

  // Largest first; a second click returns to the tree.
  sortBy(field) {
    this.filter.setSort(this.filter.sort?.name === field ? "" : field);
    this.list.box.scrollTop = 0;
  }

  narrowed() {
    return Boolean(this.only || this.filter.text.trim());
  }

  // Show only these calls, for example those of one cell.
  showOnly(indices, words) {
    this.only = new Set(indices);
    this.filter.clear();
    this.filter.input.placeholder = words;
    this.changed(true);
  }

  showAll() {
    if (!this.narrowed()) return;
    this.only = null;
    this.filter.clear();
    this.filter.input.placeholder = PLACEHOLDER;
    this.changed(true);
  }

  chosen(index) {
    const row = this.rows[index];
    if (row.call !== undefined) return this.pick(row.call);
    this.open.add(row.key);
    this.changed(true);
    this.list.setActive(index);
  }

  select(call) {
    this.selected = call;
    this.markSelected(true);
  }

  markSelected(scroll) {
    if (this.selected === undefined) return;
    let index = this.rows.findIndex((row) => row.call === this.selected);
    if (index < 0) index = this.rows.findIndex((row) => row.group?.includes(this.selected));
    this.list.setActive(index, scroll);
  }

  show(row, index) {
    const { call, group } = this.rows[index];
    if (group) this.showGroup(row, group);
    else this.showCall(row, this.run.calls[call]);
  }

  // question → answer → cost → time
  showCall(row, call) {
    const [words, tone] = stopWords(call.stop, this.run.alive),
      now = call.ended_s ?? this.run.now();
    row.style.setProperty("--depth", Math.min(call.depth, 8));
    row.setAttribute("aria-level", call.depth + 1);
    const [dot, id, text, came, mark, cost, took] = row.children;
    dot.className = `dot k-${call.kind}`;
    id.textContent = call.id;
    text.textContent = oneLine(call.question, 120);
    came.textContent = call.failed
      ? oneLine(call.error || call.reason || words, 120)
      : call.stop
        ? oneLine(call.answer, 120) || "(empty)"
        : call.state === "asking"
          ? "asking …"
          : "…";
    came.className = call.failed ? "came bad" : call.outlier ? "came odd" : "came";
    const worth = call.reward === null ? "" : String(Number(call.reward.toPrecision(3)));
    const parts = [
      call.outlier && !call.failed ? "differs" : "",
      call.stop === "final" ? "" : words,
      worth,
    ].filter(Boolean);
    mark.className = `mark ${call.outlier && !call.failed ? "odd" : call.stop !== "final" ? tone : call.reward > 0 ? "good" : worth ? "bad" : ""}`;
    mark.textContent = parts.join(" · ");
    cost.textContent =
      this.filter.sort?.name === "tokens"
        ? `${count(call.tokens_in + call.tokens_out)} tok`
        : call.cost === null
          ? ""
          : dollars(call.cost);
    took.textContent = seconds(Math.max(0, now - call.started_s));
    row.title = [call.question, call.outlier, call.reason].filter(Boolean).join("\n");
  }

  showGroup(row, group) {
    const calls = group.map((index) => this.run.calls[index]),
      first = calls[0];
    const { done, failed, odd } = tallyOf(calls);
    row.style.setProperty("--depth", Math.min(first.depth, 8));
    row.setAttribute("aria-level", first.depth + 1);
    const [dot, id, text, came, mark, cost, took] = row.children;
    dot.className = `dot k-${first.kind} many`;
    id.textContent = "▸";
    text.textContent = `${first.kind === "lm" ? "llm_query" : first.kind} × ${grouped(calls.length)}`;
    came.textContent = `${grouped(done)} done${failed ? `, ${grouped(failed)} failed` : ""}`;
    came.className = failed ? "came bad" : "came";
    mark.className = "mark odd";
    mark.textContent = odd ? `${grouped(odd)} differ${odd === 1 ? "s" : ""}` : "";
    const costs = calls.filter((call) => call.cost !== null);
    cost.textContent = costs.length ? dollars(costs.reduce((sum, call) => sum + call.cost, 0)) : "";
    const ends = calls.map((call) => call.ended_s ?? this.run.now());
    took.textContent = seconds(
      Math.max(0, ends.reduce((a, b) => Math.max(a, b), 0) - first.started_s),
    );
    row.title = "open";
  }
}

// A failure is not done.
export function tallyOf(calls) {
  const failed = calls.filter((call) => call.failed).length,
    ended = calls.filter((call) => call.stop !== null).length;
  return {
    done: ended - failed,
    failed,
    odd: calls.filter((call) => call.outlier && !call.failed).length,
  };
}

function groupKey(call) {
  return `${call.parent}/${call.turn}/${call.cell}`;
}

function make() {
  return h(
    "div.call-row",
    null,
    h("i.dot"),
    h("span.id"),
    h("span.text"),
    h("span.came"),
    h("span.mark"),
    h("span.cost"),
    h("span.took"),
  );
}
