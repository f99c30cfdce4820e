// The calls of a run as a list, each parent before its children. Siblings that are alike, and many
// plain sub-calls of one cell, form one row until it is opened. Only visible rows are elements.
//
// How the calls of a cell are shown is decided when they are first seen, so that rows of a run in
// progress do not fold or move while somebody reads them.

import { fill, h } from "./dom.js";
import { FilterInput } from "./filter.js";
import { count, dollars, grouped, number, oneLine, seconds, stopWords } from "./format.js";
import { VirtualList } from "./list.js";
import { MEASURES } from "./measures.js";

const PLACEHOLDER = "filter calls";
const TOGETHER = 8; // maximum plain sub-calls of one cell with separate rows
const MIN_SIBLINGS = 4; // fewer are not compared (types/sibling_outliers.py), so they are not called alike
const MIN_ALIKE = 3; // calls in a row that are folded
const MAX_APART = 8; // failed or differing calls of one cell with separate rows
const TWO_LINES = matchMedia("(max-width: 1300px)"); // a row's question above its answer
const ROW_PIXELS = () => (TWO_LINES.matches ? 46 : 30);

// What calls can be filtered by.
/** @returns {import("./filter.js").Fields} */
export function callFields(run) {
  const stopOf = (call) => call.stop || (run.alive ? "running" : "interrupted");
  return {
    numbers: {
      cost: MEASURES.cost.of,
      tokens: MEASURES.tokens.of,
      seconds: (call) => MEASURES.seconds.of(call, run.now()),
      depth: (call) => call.depth,
      turns: (call) => call.turns,
      reward: (call) => call.reward,
      advantage: (call) => call.advantage,
      gap: (call) => call.gap,
    },
    texts: {
      stop: stopOf,
      kind: (call) => call.kind,
      model: (call) => call.model,
      question: (call) => `${call.question} ${call.telling}`,
      answer: (call) => call.answer,
      error: (call) => call.error,
      differs: (call) => call.outlier,
      id: (call) => call.id,
    },
    words: (call) =>
      `${call.id} ${call.kind} ${call.model} ${stopWords(call.stop, run.alive)[0]} ${call.outlier} ${call.question} ${call.telling} ${call.answer} ${call.error}`,
  };
}

export class Outline {
  // run: the page's model; pick(index) is called when the user chooses a call.
  constructor(run, pick) {
    this.run = run;
    this.pick = pick;
    this.rows = []; // { call } or { group: [calls], key, alike }
    this.open = new Set(); // keys of open rows of several calls
    this.forms = new Map(); // key of a cell's calls -> "single", "whole" or "alike"
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
    this.onchange = null; // called with the order and the calls that the filter keeps, or null
    this.sorts = Object.entries(MEASURES).map(([field, { words }]) =>
      h(
        "button.small.sort",
        { type: "button", title: `sort by ${words}`, onclick: () => this.sortBy(field) },
        words,
      ),
    );
    this.again = h(
      "button.small",
      { type: "button", hidden: true, onclick: () => this.changed(true) },
      "sort again",
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
        this.again,
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
    const before = this.rows,
      top = Math.floor(this.list.box.scrollTop / this.list.rowHeight);
    this.rows = [];
    if (this.narrowed()) this.addMatches(all ? [] : before);
    else this.add(roots);
    this.list.set(this.rows.length);
    if (!all && top > 0) this.keepInPlace(before[top], top);
    this.back.hidden = !this.only;
    this.again.hidden ||= all || !this.narrowed();
    for (const [at, [field, { words }]] of Object.entries(MEASURES).entries()) {
      const sort = this.filter.sort?.name === field ? this.filter.sort : null;
      this.sorts[at].setAttribute("aria-pressed", String(Boolean(sort)));
      this.sorts[at].textContent = `${words}${sort ? (sort.down ? " ↓" : " ↑") : ""}`;
    }
    this.markSelected(false);
    const isPart = this.only || this.filter.narrows || this.filter.problem,
      shown = isPart ? `${grouped(this.rows.length)} of ` : "";
    fill(this.tally, `${shown}${grouped(this.run.calls.length)}`);
    const kept = isPart ? new Set(this.rows.map(({ call }) => call)) : null;
    this.onchange?.(this.filter.sort?.name, kept);
  }

  add(indices) {
    const stack = [...indices].reverse();
    while (stack.length) {
      const entry = stack.pop();
      if (typeof entry === "object") {
        this.rows.push(entry);
        if (this.open.has(entry.key)) stack.push(...entry.group.toReversed());
        continue;
      }
      this.rows.push({ call: entry });
      const below = this.children.get(entry);
      if (below) for (const each of this.grouped(below).reverse()) stack.push(each);
    }
  }

  // Calls and groups of the children of a call: consecutive ones of a kind that one cell made.
  grouped(indices) {
    const found = [];
    let cell = [];
    const flush = () => {
      if (cell.length) found.push(...this.cellRows(cell));
      cell = [];
    };
    for (const index of indices) {
      const call = this.run.calls[index],
        first = this.run.calls[cell[0]];
      if (first && (first.kind !== call.kind || groupKey(first) !== groupKey(call))) flush();
      cell.push(index);
    }
    flush();
    return found;
  }

  cellRows(cell) {
    const key = `${groupKey(this.run.calls[cell[0]])}/${cell[0]}`,
      form = this.form(key, cell);
    if (form === "single") return cell;
    if (form === "whole") return [{ group: cell, key, alike: false }];
    const found = [];
    let alike = [];
    const flush = () => {
      if (alike.length < MIN_ALIKE) found.push(...alike);
      else found.push({ group: alike, key: `${key}/${alike[0]}`, alike: true });
      alike = [];
    };
    for (const index of cell) {
      if (!isApart(this.run.calls[index])) alike.push(index);
      else {
        flush();
        found.push(index);
      }
    }
    flush();
    return found;
  }

  form(key, cell) {
    const known = this.forms.get(key);
    if (known && known !== "single") return known;
    const calls = cell.map((index) => this.run.calls[index]),
      isPlain = calls[0].kind !== "rlm" && !cell.some((index) => this.children.has(index)),
      isMany = isPlain && cell.length > TOGETHER;
    if (known && !isMany) return known;
    const { parent, turn } = calls[0],
      made = this.run.calls[parent],
      isOver = !this.run.alive || !made || made.stop !== null || made.turns > turn + 1,
      apart = calls.filter(isApart).length;
    let form = isMany ? "whole" : "single";
    if (isOver && apart <= MAX_APART && !known)
      if (isMany || (cell.length >= MIN_SIBLINGS && haveOneQuestion(calls))) form = "alike";
    if (calls.every((call) => call.question)) this.forms.set(key, form); // texts arrive later
    return form;
  }

  // Rows `before` keep their order: those of new calls come after them, until one sorts again.
  addMatches(before) {
    this.run.calls.forEach((call, index) => {
      if (this.only ? this.only.has(index) : this.filter.matches(call))
        this.rows.push({ call: index });
    });
    const { order } = this.filter,
      { calls } = this.run,
      known = new Map(before.map(({ call }, at) => [call, at]));
    const at = ({ call }) => known.get(call) ?? Infinity;
    this.again.hidden = !order || !before.length;
    if (!order || this.only) return;
    this.rows.sort((a, b) =>
      at(a) === at(b) ? order(calls[a.call], calls[b.call]) : at(a) - at(b),
    );
  }

  // The row that was at the top of the list stays there when others appear above it.
  keepInPlace(row, before) {
    const now = this.rows.findIndex((each) => each.call === row?.call && each.key === row?.key);
    if (now >= 0) this.list.box.scrollTop += (now - before) * this.list.rowHeight;
  }

  // Largest first; a second click returns to the tree.
  sortBy(field, isFinal = false) {
    this.filter.setSort(this.filter.sort?.name === field && !isFinal ? "" : field);
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
    if (!this.open.delete(row.key)) this.open.add(row.key);
    this.changed(true);
    this.list.setActive(index);
  }

  select(call) {
    this.selected = call;
    this.markSelected(true);
  }

  markSelected(scroll) {
    if (this.selected === undefined) return;
    let index = -1;
    // a call in a closed row is shown by that row, or by the one of its nearest shown parent
    for (let at = this.selected; at >= 0 && index < 0; at = this.run.calls[at].parent) {
      index = this.rows.findIndex((row) => row.call === at);
      if (index < 0) index = this.rows.findIndex((row) => row.group?.includes(at));
    }
    this.list.setActive(index, scroll);
  }

  show(row, index) {
    const { call, group } = this.rows[index];
    if (group) this.showGroup(row, this.rows[index]);
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
    text.textContent = call.telling ? `…${call.telling}` : oneLine(call.question, 120);
    row.removeAttribute("aria-expanded");
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

  showGroup(row, { group, key, alike }) {
    const calls = group.map((index) => this.run.calls[index]),
      first = calls[0],
      isOpen = this.open.has(key);
    const { done, failed, odd } = tallyOf(calls);
    row.style.setProperty("--depth", Math.min(first.depth, 8));
    row.setAttribute("aria-level", first.depth + 1);
    row.setAttribute("aria-expanded", String(isOpen));
    const [dot, id, text, came, mark, cost, took] = row.children;
    dot.className = `dot k-${first.kind} many`;
    id.textContent = isOpen ? "▾" : "▸";
    text.textContent = alike
      ? `${grouped(calls.length)} alike: ${rangeOfNames(calls)}`
      : `${first.kind === "lm" ? "llm_query" : first.kind} × ${grouped(calls.length)}`;
    came.textContent = alike
      ? rangeOfAnswers(calls)
      : `${grouped(done)} done${failed ? `, ${grouped(failed)} failed` : ""}`;
    came.className = failed ? "came bad" : "came";
    mark.className = "mark odd";
    mark.textContent = odd ? `${grouped(odd)} differ${odd === 1 ? "s" : ""}` : "";
    const costs = calls.filter((call) => call.cost !== null);
    cost.textContent = costs.length ? dollars(costs.reduce((sum, call) => sum + call.cost, 0)) : "";
    const ends = calls.map((call) => call.ended_s ?? this.run.now());
    took.textContent = seconds(
      Math.max(0, ends.reduce((a, b) => Math.max(a, b), 0) - first.started_s),
    );
    row.title = isOpen ? "close" : "open";
  }
}

// Whether a call has a row of its own between calls that are alike.
function isApart(call) {
  return Boolean(call.failed || call.outlier || call.stop !== "final");
}

// Whether questions have the same words around what tells them apart, or are the same.
function haveOneQuestion(calls) {
  return calls.every((call) => call.telling || call.question === calls[0].question);
}

// "sheet 1 … sheet 6"
function rangeOfNames(calls) {
  const [first, last] = [calls[0], calls.at(-1)].map((call) =>
    oneLine((call.telling || call.question).split(/[:;?!](?:\s|$)/)[0], 28),
  );
  return first === last ? first : `${first} … ${last}`;
}

// "30,752 to 31,768", or the answer that all have, or the first and that there are others.
function rangeOfAnswers(calls) {
  const answers = calls.map((call) => call.answer),
    numbers = answers.map((answer) => (answer.trim() ? Number(answer.replace(/,/g, "")) : NaN));
  if (answers.every((answer) => answer === answers[0])) return oneLine(answers[0], 60) || "(empty)";
  if (numbers.some(Number.isNaN)) return `${oneLine(answers[0], 50)}, …`;
  const sorted = numbers.sort((a, b) => a - b);
  return `${number(sorted[0])} to ${number(sorted.at(-1))}`;
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
