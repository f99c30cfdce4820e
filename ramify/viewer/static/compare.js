// Two or more runs as a difference: the cell and the number at which two of them part, then the calls
// that differ, then the rest, folded: all calls, all figures, and a call word by word.
//
//   #/compare/RUN/RUN[/RUN…][/call/ID]      with a call, that call is open word by word
//
// The cause of a difference is looked for downwards: if the same code gives something else, then in
// the first of its sub-calls that differs, and so on.

import { get } from "./api.js";
import { apart, firstDifference, numbersApart, parting, reasonOf } from "./difference.js";
import { fill, h, toast } from "./dom.js";
import {
  count,
  dollars,
  grouped,
  many,
  moment,
  number,
  oneLine,
  runAddress,
  seconds,
  stopWords,
} from "./format.js";
import { VirtualList } from "./list.js";
import {
  aligned,
  answerRow,
  callText,
  cellRows,
  diffRow,
  promptRow,
  turnRows,
} from "./pair_rows.js";
import { listPlaces } from "./run_list.js";
import { scoresOf } from "./story.js";
import { table } from "./table.js";
import { textOf } from "./turn.js";

const MAX_RUNS = 8; // as in viewer/run_comparison.py
const MAX_CHOICES = 200; // runs in a menu
const ROW_PX = 44;
const FIRST = new Set(["question", "answer", "score", "ended"]); // figures above the difference
const EVERYWHERE = { what: "answer", turn: Infinity, at: Infinity, texts: ["", ""] };
const MAX_CAUSES = 5; // calls on the way from the answer down to the cause

export async function comparePage(page, keys, route) {
  const view = new CompareView(page, keys);
  await view.start(route);
  return view;
}

class CompareView {
  constructor(page, keys) {
    this.page = page;
    this.runs = keys; // their addresses
    this.pair = [0, 1]; // which of the runs are compared word by word
    this.isWhole = false; // whether calls with the same answers are listed, too
    this.known = [];
    this.said = []; // sentences of the difference
    this.transcripts = new Map(); // "RUN CALL" -> its transcript
    this.row = null;
    this.heads = []; // one for each run
    this.rows = []; // calls of the runs that have the same question
  }

  async start(route) {
    document.title = "Compare · Ramify";
    const { runs } = await listPlaces();
    this.known = runs.filter((run) => !run.problem);
    if (this.known.length < 2 && this.runs.length < 2)
      return fill(
        this.page,
        h(
          "div.empty",
          null,
          h("h1", null, "Compare"),
          h("p", null, "There are fewer than two runs to compare."),
        ),
      );
    this.runs = this.chosen().slice(0, MAX_RUNS);
    await this.read(route);
  }

  // Reads the runs and draws the page; also a second time, for runs in progress.
  async read(route) {
    this.close();
    this.transcripts.clear();
    const { heads, rows } = await get(
      "/api/compare",
      this.runs.map((key) => ["key", key]),
    );
    Object.assign(this, { heads, rows });
    const answers = heads.map((head) => `${head.has_answer} ${head.answer}`);
    this.pair = [
      0,
      Math.max(
        1,
        answers.findIndex((answer) => answer !== answers[0]),
      ),
    ];
    this.calls = h("div.compared-calls");
    this.cause = h("section.cause", { "aria-label": "what differs" });
    this.body = h("div.pair");
    this.words = h(
      "details.words",
      { ontoggle: () => this.words.open && this.draw() },
      h("summary", null, h("h2", null, "word by word")),
      h("div.choose", null, this.callChoice()),
      this.body,
    );
    const more = this.known.filter((run) => !this.runs.includes(run.key)).slice(0, MAX_CHOICES);
    fill(
      this.page,
      h(
        "div.wide",
        null,
        h(
          "div.wide-head",
          null,
          h("h1", null, `Compare ${many(this.runs.length, "run")}`),
          h("span.quiet", null, this.summary()),
          h("span.spread"),
          more.length && this.runs.length < MAX_RUNS
            ? this.menu(
                "another run",
                more,
                "",
                (key) => this.open([...this.runs, key]),
                "+ another run",
              )
            : null,
        ),
        heads.flatMap((head) => head.problems.map((text) => h("p.problem", null, text))),
        this.inProgress(),
        h(
          "div.scroll-x",
          { tabindex: "0", role: "region", "aria-label": "runs" },
          this.figures(
            this.lines().filter(([name]) => FIRST.has(name)),
            this.heads.map((head, at) => this.columnHead(head, at)),
          ),
        ),
        h("div.choose.which", null, h("h2", null, "what differs"), this.choices()),
        this.cause,
        this.calls,
        h(
          "details.all-figures",
          null,
          h("summary", null, h("h2", null, "figures")),
          h(
            "div.scroll-x",
            { tabindex: "0", role: "region", "aria-label": "figures" },
            this.figures(
              this.lines().filter(([name]) => !FIRST.has(name)),
              this.heads.map((_, at) => h("b.run-letter", null, letter(at))),
            ),
          ),
        ),
        this.words,
      ),
    );
    this.drawCalls();
    await this.show(route);
    await this.drawCause();
  }

  close() {
    if (this.list) this.list.close();
  }

  // A run in progress is compared as far as it has come.
  inProgress() {
    const alive = this.heads.map((head, at) => (head.alive ? letter(at) : "")).filter(Boolean);
    return alive.length
      ? h(
          "p.note",
          { role: "status" },
          `${alive.join(" and ")} ${alive.length > 1 ? "are" : "is"} in progress: this is the comparison so far. `,
          h("button.small", { type: "button", onclick: () => this.read({}) }, "refresh"),
        )
      : null;
  }

  shared() {
    const letters = this.runs.map((_, at) => letter(at)),
      answers = (row) => row.calls.map((call) => (call ? oneLine(call[1], 300) : "no such call"));
    const differing = this.rows.filter(isDifferent);
    return {
      name: "compare",
      title: `Compare ${many(this.runs.length, "run")}`,
      parts: [
        { text: this.said.join("\n") },
        { text: this.summary() },
        {
          table: {
            head: ["", ...letters],
            rows: this.lines().map(([name, words]) => [name, ...this.heads.map(words)]),
          },
        },
        { heading: "Calls that differ" },
        {
          table: {
            head: ["call", "question", ...letters],
            rows: differing.map((row) => [
              row.calls.find(Boolean)[0],
              oneLine(row.question, 200),
              ...answers(row),
            ]),
          },
        },
      ],
    };
  }

  // The runs in the address, and others for those that it lacks: with the same question if there is
  // one.
  chosen() {
    const keys = [...this.runs];
    if (!keys.length) keys.push(this.known[0].key);
    if (keys.length === 1) {
      const question = this.known.find((run) => run.key === keys[0])?.question,
        others = this.known.filter((run) => run.key !== keys[0]);
      const other = others.find((run) => run.question === question) || others[0];
      if (!other) throw new Error("there is no other run to compare with");
      keys.push(other.key);
    }
    return keys;
  }

  open(keys) {
    location.hash = `#/compare/${keys.map(encodeURIComponent).join("/")}`;
  }

  summary() {
    const differ = this.rows.filter(isDifferent).length,
      lacking = this.rows.filter((row) => row.calls.includes(null)).length;
    return [
      `${many(this.rows.length, "call")} matched by question`,
      differ
        ? `${grouped(differ)} ${differ === 1 ? "differs" : "differ"}`
        : "all have the same answers",
      lacking ? `${grouped(lacking)} missing from some runs` : "",
    ]
      .filter(Boolean)
      .join("; ");
  }

  // --- the difference ----------------------------------------------------------------------------

  // The first of the runs and the next one with another answer are compared, until others are chosen.
  async drawCause() {
    const pair = [...this.pair],
      letters = pair.map(letter);
    const { ways, words } = await this.causes(pair);
    if (pair.join() !== this.pair.join()) return; // others were chosen meanwhile
    this.cause.style.setProperty("--left", `"${letters[0]}"`);
    this.cause.style.setProperty("--right", `"${letters[1]}"`);
    const sentences = ways.map((way, index) => this.sentenceOf(way, ways[index - 1]));
    this.said = [words, ...sentences.map((parts) => parts.join(""))];
    fill(
      this.cause,
      h("p.answers-apart", null, words),
      ways.map((way, index) => {
        const [place, reason] = sentences[index];
        return [
          h(
            "p.parting",
            { id: index ? null : "parting", role: "note" },
            h("a", { href: this.addressOf(way.row), title: "word by word" }, place),
            reason,
          ),
          numbersOf(way, letters),
          h("div.pair", null, this.placeOf(way)),
        ];
      }),
    );
  }

  // { words, ways }: what the answers say, and the calls that differ, the cause first.
  async causes(pair) {
    const heads = pair.map((at) => this.heads[at]),
      letters = pair.map(letter);
    if (this.runs[pair[0]] === this.runs[pair[1]])
      return { ways: [], words: "Both sides are the same run: choose another one." };
    const ways = [];
    let at = this.rows.findIndex((row) => pair.some((run) => row.calls[run]));
    while (at >= 0 && ways.length < MAX_CAUSES) {
      const row = this.rows[at],
        calls = await this.callsOf(row, pair);
      const found = this.differenceOf(calls);
      if (!found && !ways.length && !row.depth) {
        at = this.causeBelow(at, pair, EVERYWHERE);
        continue;
      }
      if (!found) break;
      ways.unshift({ row, calls, pair, found });
      at = ["output", "answer"].includes(found.what) ? this.causeBelow(at, pair, found) : -1;
    }
    return { ways, words: answersApart(heads, letters, ways) };
  }

  differenceOf(calls) {
    if (calls.includes(null)) return { what: "missing", turn: 0, at: -1, texts: ["", ""] };
    const texts = calls.map((call) => textOf(call.answer)),
      turn = Math.max(0, calls[0].turns.length - 1);
    return (
      firstDifference(calls) ??
      (texts[0] === texts[1] ? null : { what: "answer", turn, at: -1, texts })
    );
  }

  // Index of the row of the sub-call that made the code give something else: one whose answers are in
  // the texts that differ, else the first that differs. -1 without any.
  causeBelow(at, pair, { what, turn, at: cell, texts }) {
    const below = [];
    for (let next = at + 1; this.rows[next]?.depth > this.rows[at].depth; next++) {
      const calls = pair.map((run) => this.rows[next].calls[run]),
        isBelow = this.rows[next].depth === this.rows[at].depth + 1;
      if (!isBelow || !calls[0] || !calls[1] || calls[0][1] === calls[1][1]) continue;
      const [, , , , , , ownTurn, ownCell] = calls[0];
      if (what === "answer" || ownTurn < turn || (ownTurn === turn && ownCell <= cell))
        below.push([next, calls]);
    }
    const telling = below.find(([, calls]) =>
      calls.every((call, side) => call[1] && texts[side].includes(call[1])),
    );
    return (telling ?? below[0])?.[0] ?? -1;
  }

  // [place, reason] of a difference; `below` is the call that causes it.
  /** @returns {[string, string]} */
  sentenceOf({ calls, found, pair }, below) {
    const { what, turn, at } = found,
      letters = pair.map(letter),
      lacks = calls.indexOf(null);
    if (lacks >= 0) {
      const head = this.heads[pair[lacks]],
        id = `Call ${calls[1 - lacks].id}`;
      return head.num_calls
        ? [id, ` is only in ${letters[1 - lacks]}.`]
        : [
            id,
            ` is only in ${letters[1 - lacks]}: ${letters[lacks]} made no calls (${endingOf(head)})`,
          ];
    }
    const id = `Call ${calls[0].id}${calls[0].id === calls[1].id ? "" : ` (${calls[1].id} in ${letters[1]})`}`,
      since = below ? ` because of call ${below.calls[0].id}` : "";
    if (what === "answer") return [id, `: every turn is the same, but the answers differ${since}.`];
    const short = calls.findIndex((call) => !call.turns.length);
    if (short >= 0) {
      const why = textOf(calls[short].error) || stopWords(calls[short].stop)[0];
      return [id, `: ${letters[short]} ended before its first turn: ${oneLine(why, 200)}`];
    }
    const cell = what === "output" && calls[0].turns[turn].cells.length > 1;
    return [
      `${id}, turn ${turn + 1}${cell ? `, cell ${at + 1}` : ""}`,
      `: ${reasonOf(found)}${since}.`,
    ];
  }

  // The texts at which two calls part, side by side.
  placeOf({ calls, found }) {
    const { what, turn, at } = found;
    if (what === "missing" || what === "ends") return null;
    if (what === "answer") return answerRow(calls);
    const turns = calls.map((call) => call.turns[turn]);
    if (what === "told")
      return promptRow(
        turns.map((each) => each.prompt[at]),
        false,
      );
    const cells = turns.map((each) => each.cells[Math.max(0, at)]);
    return cells[0] || cells[1]
      ? cellRows(cells)
      : diffRow(
          "reply",
          turns.map((each) => textOf(each.reply.content)),
          "reply",
        );
  }

  // The transcripts of a row's calls in two runs; null where a run has no such call.
  callsOf(row, pair) {
    return Promise.all(
      pair.map((run) => {
        const id = row.calls[run]?.[0];
        if (id === undefined) return null;
        const name = `${this.runs[run]} ${id}`;
        if (!this.transcripts.has(name))
          this.transcripts.set(name, get("/api/call", { key: this.runs[run], id }));
        return this.transcripts.get(name);
      }),
    );
  }

  menu(label, runs, chosen, pick, first = "") {
    const select = h(
      "select",
      { "aria-label": label, onchange: () => pick(select.value) },
      first ? h("option", { value: "" }, first) : null,
      runs.map((run) =>
        h(
          "option",
          { value: run.key, selected: run.key === chosen },
          `${moment(run.started_at)} · ${oneLine(run.question || run.id, 50)}${run.reward === undefined || run.reward === null ? "" : ` · ${number(run.reward)}`}`,
        ),
      ),
    );
    return select;
  }

  // [name, words of a run] of each figure.
  lines() {
    const reward = (head) =>
      Object.entries(scoresOf(head))
        .map(([name, value]) => `${name} ${number(value)}`)
        .join(", ");
    /** @type {[string, (head: any) => string][]} */
    const all = [
      ["question", (head) => oneLine(head.question, 300)],
      [
        "answer",
        (head) => (head.has_answer ? oneLine(head.answer, 300) : head.alive ? "none yet" : "none"),
      ],
      ["score", reward],
      ["ended", (head) => head.ending || stopWords(head.stop, head.alive)[0]],
      ["task", (head) => head.task],
      ["calls", (head) => grouped(head.num_calls)],
      ["tokens", (head) => count(head.usage.input_tokens + head.usage.output_tokens)],
      ["cost", (head) => dollars(head.cost)],
      ["time", (head) => seconds(head.seconds)],
    ];
    return all.filter(([, words]) => this.heads.some((head) => words(head)));
  }

  // The figures of each run as a column; a figure that differs from the first run's is marked.
  figures(lines, names) {
    /** @type {import("./table.js").Column[]} */
    const columns = [
      { name: null, isHead: true, cell: ([name]) => name },
      ...this.heads.map((head, at) => ({
        name: names[at],
        cell: ([, words]) => words(head) || "–",
        tone: ([, words]) => (at && words(head) !== words(this.heads[0]) ? "differs" : ""),
      })),
    ];
    return table("table.figures.compared-runs", columns, lines);
  }

  columnHead(head, at) {
    const remove = () => this.open(this.runs.filter((_, each) => each !== at));
    return [
      h("b.run-letter", null, letter(at)),
      h("a", { href: runAddress(this.runs[at]) }, moment(head.started_at)),
      this.runs.length > 2
        ? h(
            "button.small.remove",
            { type: "button", "aria-label": `remove run ${letter(at)}`, onclick: remove },
            "×",
          )
        : null,
    ];
  }

  // --- the calls ---------------------------------------------------------------------------------

  drawCalls() {
    const num = this.rows.length - this.rows.filter(isDifferent).length,
      toggle = h(
        "button.small",
        {
          type: "button",
          "aria-pressed": "false",
          hidden: !num,
          onclick: () => {
            this.isWhole = !this.isWhole;
            toggle.setAttribute("aria-pressed", String(this.isWhole));
            this.arrange();
          },
        },
        `all calls (${grouped(num)} more)`,
      );
    const columns = `minmax(170px, 1.5fr) repeat(${this.runs.length}, minmax(120px, 1fr))`;
    this.list = new VirtualList({
      rowHeight: ROW_PX,
      make: () =>
        h(
          "div.pair-row",
          { style: { "grid-template-columns": columns } },
          h("span.asked"),
          this.runs.map(() => h("span.came")),
        ),
      show: (row, index) => this.showRow(row, this.shown[index]),
      pick: (index) => this.go(this.shown[index]),
      label: "calls",
    });
    this.list.onmove = (index) => this.stepTo(this.shown[index]);
    const table = h(
      "div.pair-rows",
      { style: { "min-width": `${210 + 132 * this.runs.length}px` } },
      h(
        "div.pair-row.head",
        { style: { "grid-template-columns": columns }, "aria-hidden": "true" },
        h("span", null, "question"),
        this.runs.map((_, at) => h("span", null, h("b.run-letter", null, letter(at)), "answer")),
      ),
      this.list.box,
    );
    this.tally = h("span.quiet");
    fill(
      this.calls,
      h("div.choose", null, h("h2", null, "calls that differ"), this.tally, toggle),
      h("div.scroll-x", null, table),
    );
    this.arrange();
  }

  arrange() {
    this.shown = this.isWhole ? this.rows : this.rows.filter(isDifferent);
    fill(this.tally, this.shown.length ? "" : "none");
    this.list.box.parentElement.hidden = !this.shown.length;
    this.list.box.style.height = `${Math.min(this.shown.length, 8) * ROW_PX + 2}px`;
    this.list.set(this.shown.length);
    this.list.setActive(this.shown.indexOf(this.row));
  }

  showRow(element, row) {
    const [asked, ...cells] = element.children;
    element.classList.toggle("differs", !row.same);
    fill(asked, h("span.id", null, row.calls.find(Boolean)[0]), ` ${oneLine(row.question, 120)}`);
    asked.style.paddingLeft = `${Math.min(row.depth, 6) * 12}px`;
    row.calls.forEach((call, at) => {
      cells[at].className = `came ${!call ? "none" : call[4] ? "bad" : call[5] ? "odd" : ""}`;
      fill(
        cells[at],
        call
          ? [
              oneLine(call[1], 100) || "(empty)",
              h(
                "span.quiet",
                null,
                [call[2] === null ? "" : dollars(call[2]), call[3] === null ? "" : seconds(call[3])]
                  .filter(Boolean)
                  .join(" · "),
              ),
            ]
          : "no such call",
      );
    });
    element.title = row.question;
  }

  addressOf(row) {
    return `#/compare/${this.runs.map(encodeURIComponent).join("/")}/call/${encodeURIComponent(row.calls.find(Boolean)[0])}`;
  }

  go(row) {
    location.hash = this.addressOf(row);
  }

  // As go(), without an entry in the history: `j` and `k`.
  stepTo(row) {
    location.replace(this.addressOf(row));
  }

  keyboardRow(step) {
    const at = this.shown.indexOf(this.row),
      next = this.shown[Math.min(this.shown.length - 1, Math.max(0, at + step))];
    if (next && next !== this.row) this.stepTo(next);
  }

  nextDifferent() {
    const at = this.rows.indexOf(this.row),
      next = [...this.rows.slice(at + 1), ...this.rows.slice(0, at + 1)].find(isDifferent);
    if (next) this.stepTo(next);
    else toast("no calls differ");
  }

  keys() {
    return {
      j: ["next call", () => this.keyboardRow(1)],
      k: ["previous call", () => this.keyboardRow(-1)],
      o: ["next call that differs", () => this.nextDifferent()],
    };
  }

  // --- two of the runs, word by word -------------------------------------------------------------

  // Menus for the two runs.
  choices() {
    const inAll = this.runs.map((key, at) => ({
      key,
      started_at: this.heads[at].started_at,
      question: `${letter(at)}: ${this.heads[at].question}`,
    }));
    const rest =
      this.runs.length > 2
        ? []
        : this.known.filter((run) => !this.runs.includes(run.key)).slice(0, MAX_CHOICES);
    const side = (at, label) =>
      this.menu(label, [...inAll, ...rest], this.runs[this.pair[at]], (key) => {
        if (this.runs.length === 2)
          return this.open(this.runs.map((each, index) => (index === this.pair[at] ? key : each)));
        this.pair[at] = this.runs.indexOf(key);
        this.draw();
        this.drawCause();
      });
    return [side(0, "left run"), side(1, "right run")];
  }

  callChoice() {
    const rows = this.rows.slice(0, 1000);
    this.which = h(
      "select",
      { "aria-label": "which call", onchange: () => this.go(this.rows[Number(this.which.value)]) },
      rows.map((row, at) =>
        h(
          "option",
          { value: String(at) },
          `call ${row.calls.find(Boolean)[0]}${row.same ? "" : " *"}`,
        ),
      ),
    );
    return this.rows.length > 1 ? this.which : null;
  }

  // The address names a call: the first run that has it decides.
  async show(route) {
    const named =
      route.call &&
      this.runs
        .map((_, run) => this.rows.find((row) => row.calls[run]?.[0] === route.call))
        .find(Boolean);
    this.row = named || this.rows[0] || null;
    if (!this.row) return fill(this.body, h("p.note", null, "These runs have made no calls yet."));
    const isMoved = named && !this.words.open;
    if (named) this.words.open = true;
    this.list.setActive(this.shown.indexOf(this.row));
    this.which.value = String(this.rows.indexOf(this.row));
    if (this.runs.length > 2) this.pair = this.pairOf(this.row);
    await this.draw();
    if (isMoved) this.words.scrollIntoView({ block: "nearest" });
  }

  // The chosen runs if both have the call, else the first two that have it.
  pairOf(row) {
    const having = row.calls.map((call, at) => (call ? at : -1)).filter((at) => at >= 0);
    return this.pair.every((at) => row.calls[at]) || having.length < 2
      ? this.pair
      : having.slice(0, 2);
  }

  async draw() {
    if (!this.words.open || !this.row) return;
    const row = this.row,
      pair = [...this.pair];
    const calls = await this.callsOf(row, pair);
    // another call was chosen meanwhile
    if (row !== this.row || pair.join() !== this.pair.join()) return;
    for (const [side, at] of pair.entries())
      this.body.style.setProperty(side ? "--right" : "--left", `"${letter(at)}"`);
    const heads = pair.map((at, side) => this.sideHead(at, calls[side]));
    if (calls.includes(null)) {
      const only = calls.findIndex(Boolean);
      if (only < 0)
        return fill(
          this.body,
          heads,
          h(
            "p.note.across",
            null,
            "Neither of these two runs has this call; choose two others above.",
          ),
        );
      return fill(
        this.body,
        heads,
        h("p.parting", null, `Only run ${letter(pair[only])} has this call.`),
        aligned(
          calls.map((call) =>
            call ? [callText("question", call.question), callText("answer", call.answer)] : [],
          ),
        ),
      );
    }
    fill(this.body, heads, this.turns(calls));
  }

  turns(calls) {
    const rows = [],
      most = Math.max(...calls.map((call) => call.turns.length));
    const [parted, why] = parting(calls) || [most, ""];
    if (textOf(calls[0].question) !== textOf(calls[1].question))
      rows.push(
        diffRow(
          "question",
          calls.map((call) => textOf(call.question)),
        ),
      );
    if (calls[0].context?.digest !== calls[1].context?.digest)
      rows.push(
        aligned(
          calls.map(({ context }) =>
            h(
              "p.note",
              null,
              context
                ? `different context: ${context.kind}, ${count(context.chars)} characters`
                : "no context",
            ),
          ),
        ),
      );
    for (let turn = 0; turn < most; turn++) {
      const turns = calls.map((call) => call.turns[turn]);
      if (turn === parted) {
        rows.push(
          h("p.parting", { role: "note" }, `They diverge here, at turn ${turn + 1}: ${why}.`),
        );
      }
      rows.push(
        ...turnRows(
          turns,
          turn,
          calls,
          this.pair.map((at) => this.runs[at]),
          turn < parted,
        ),
      );
    }
    if (parted === most)
      rows.push(
        h(
          "p.note.across",
          null,
          textOf(calls[0].answer) === textOf(calls[1].answer)
            ? "They never diverge: every turn is the same."
            : "Every turn is the same, but the answers differ.",
        ),
      );
    return [...rows, answerRow(calls)];
  }

  sideHead(at, call) {
    const [words, tone] = call
      ? stopWords(call.stop, this.heads[at].alive)
      : ["no such call", "warn"];
    return h(
      "div.side-head",
      null,
      h(
        "h3",
        null,
        h("b.run-letter", null, letter(at)),
        call
          ? h(
              "a",
              { href: `${runAddress(this.runs[at])}/call/${encodeURIComponent(call.id)}` },
              `call ${call.id}`,
            )
          : "",
        " ",
        h("span", { class: `badge ${tone}` }, words),
      ),
      call
        ? h(
            "p.quiet",
            null,
            [
              call.model,
              many(call.num_turns, "turn"),
              `${count(call.usage.input_tokens + call.usage.output_tokens)} tokens`,
              dollars(call.cost),
              call.ended_s === null ? "" : seconds(call.ended_s - call.started_s),
            ]
              .filter(Boolean)
              .join(" · "),
          )
        : null,
    );
  }
}

function letter(at) {
  return String.fromCharCode(65 + at);
}

// A call that at least two of the runs have, with different answers. Others follow from such a call.
function isDifferent(row) {
  return !row.same && row.calls.filter(Boolean).length > 1;
}

function endingOf(head) {
  return oneLine(head.ending || stopWords(head.stop, head.alive)[0], 200);
}

// What two runs answer, in one sentence.
function answersApart(heads, letters, ways) {
  const lacking = heads.findIndex((head) => !head.has_answer);
  if (heads.every((head) => !head.has_answer && !head.alive)) return "Neither has an answer.";
  if (lacking >= 0) {
    const words = heads.map(
      (head, side) =>
        `${letters[side]} ${head.has_answer ? `answers ${oneLine(head.answer, 120)}` : head.alive ? "has no answer yet" : "has no answer"}`,
    );
    return `${words.join("; ")}.`;
  }
  const [left, right] = heads.map((head) => head.answer);
  const question =
    heads[0].question === heads[1].question ? "" : "They were asked different questions. ";
  const how = !ways.length
    ? ", and every turn is the same"
    : ways.at(-1).row.depth
      ? ", although a sub-call answers differently"
      : ", but in different ways";
  if (left === right)
    return `${question}Both answer ${oneLine(left, 120) || "with an empty string"}${how}.`;
  const numbers = numbersApart(left, right);
  return `${question}${letters[0]} answers ${oneLine(left, 120)} and ${letters[1]} ${oneLine(right, 120)}${numbers.length === 1 ? `: ${apart(numbers[0])}` : ""}.`;
}

// The numbers that differ at the place where two calls part.
function numbersOf({ found }, letters) {
  const numbers = found.what === "told" ? [] : numbersApart(...found.texts);
  return numbers.length
    ? h(
        "p.numbers-apart",
        null,
        numbers.map((pair) =>
          h(
            "span",
            null,
            pair.map((each, side) => [
              h("b.run-letter", null, letters[side]),
              " ",
              h("b", null, each),
              " ",
            ]),
            h("span.quiet", null, apart(pair)),
          ),
        ),
      )
    : null;
}
