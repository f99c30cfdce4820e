// Two or more runs side by side: their figures, their calls matched by question, and one call of
// two of them as a difference word by word: prompts, code, output and answers.
//
//   #/compare/RUN/RUN[/RUN…][/call/ID]

import { get } from "./api.js";
import { codeBlock, textBlock } from "./code.js";
import { diffTexts, markDifferences, sizeOfDifference } from "./diff.js";
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
import { listPlaces } from "./run_list.js";
import { scoresOf } from "./story.js";
import { table } from "./table.js";
import { pieces, textOf } from "./turn.js";

const MAX_RUNS = 8; // as in viewer/comparison.py
const MAX_CHOICES = 200; // runs in a menu
const ROW_PX = 44;

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
    this.onlyDifferent = false;
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
          h("p", null, "There are not two runs to compare."),
        ),
      );
    this.runs = this.chosen().slice(0, MAX_RUNS);
    const { heads, rows } = await get(
      "/api/compare",
      this.runs.map((key) => ["key", key]),
    );
    Object.assign(this, { heads, rows });
    this.calls = h("div.compared-calls");
    this.body = h("div.pair");
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
        h(
          "div.scroll-x",
          { tabindex: "0", role: "region", "aria-label": "the runs" },
          this.figures(),
        ),
        this.calls,
        h("h2.pair-title", null, "word by word"),
        h("div.choose", null, this.choices()),
        this.body,
      ),
    );
    this.drawCalls();
    await this.show(route);
  }

  close() {
    if (this.list) this.list.close();
  }

  shared() {
    const letters = this.runs.map((_, at) => letter(at)),
      answers = (row) => row.calls.map((call) => (call ? oneLine(call[1], 300) : "no such call"));
    const differing = this.rows.filter((row) => !row.same);
    return {
      name: "compare",
      title: `Compare ${many(this.runs.length, "run")}`,
      parts: [
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
    const differ = this.rows.filter((row) => !row.same).length;
    return `${many(this.rows.length, "call")} matched by question; ${differ ? `${grouped(differ)} differ` : "all have the same answers"}`;
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
      ["answer", (head) => (head.has_answer ? oneLine(head.answer, 300) : "none")],
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
  figures() {
    /** @type {import("./table.js").Column[]} */
    const columns = [
      { name: null, isHead: true, cell: ([name]) => name },
      ...this.heads.map((head, at) => ({
        name: this.columnHead(head, at),
        cell: ([, words]) => words(head) || "–",
        tone: ([, words]) => (at && words(head) !== words(this.heads[0]) ? "differs" : ""),
      })),
    ];
    return table("table.figures.compared-runs", columns, this.lines());
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
    const toggle = h(
      "button.small",
      {
        type: "button",
        "aria-pressed": "false",
        onclick: () => {
          this.onlyDifferent = !this.onlyDifferent;
          toggle.setAttribute("aria-pressed", String(this.onlyDifferent));
          this.arrange();
        },
      },
      "only calls that differ",
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
      label: "calls of the runs",
    });
    this.list.onmove = (index) => this.go(this.shown[index]);
    const table = h(
      "div.pair-rows",
      { style: { "min-width": `${170 + 132 * this.runs.length}px` } },
      h(
        "div.pair-row.head",
        { style: { "grid-template-columns": columns }, "aria-hidden": "true" },
        h("span", null, "question"),
        this.runs.map((_, at) => h("span", null, h("b.run-letter", null, letter(at)), "answer")),
      ),
      this.list.box,
    );
    fill(
      this.calls,
      h("div.choose", null, h("h2", null, "calls"), toggle),
      h("div.scroll-x", null, table),
    );
    this.arrange();
  }

  arrange() {
    this.shown = this.onlyDifferent ? this.rows.filter((row) => !row.same) : this.rows;
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

  go(row) {
    location.hash = `#/compare/${this.runs.map(encodeURIComponent).join("/")}/call/${encodeURIComponent(row.calls.find(Boolean)[0])}`;
  }

  keyboardRow(step) {
    const at = this.shown.indexOf(this.row),
      next = this.shown[Math.min(this.shown.length - 1, Math.max(0, at + step))];
    if (next && next !== this.row) this.go(next);
  }

  nextDifferent() {
    const at = this.rows.indexOf(this.row),
      next = [...this.rows.slice(at + 1), ...this.rows.slice(0, at + 1)].find((row) => !row.same);
    if (next) this.go(next);
    else toast("no call differs");
  }

  keys() {
    return {
      j: ["next call", () => this.keyboardRow(1)],
      k: ["previous call", () => this.keyboardRow(-1)],
      o: ["next call that differs", () => this.nextDifferent()],
    };
  }

  // --- two of the runs, word by word -------------------------------------------------------------

  // Menus for the two runs and for the call.
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
      });
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
    return [side(0, "left run"), side(1, "right run"), this.rows.length > 1 ? this.which : null];
  }

  // The address names a call: the first run that has it decides.
  async show(route) {
    const named =
      route.call &&
      this.runs
        .map((_, run) => this.rows.find((row) => row.calls[run]?.[0] === route.call))
        .find(Boolean);
    this.row = named || this.rows[0] || null;
    if (!this.row) return fill(this.body, h("p.note", null, "These runs have no call yet."));
    this.list.setActive(this.shown.indexOf(this.row));
    this.which.value = String(this.rows.indexOf(this.row));
    if (this.runs.length > 2) this.pair = this.pairOf(this.row);
    await this.draw();
  }

  // The chosen runs if both have the call, else the first two that have it.
  pairOf(row) {
    const having = row.calls.map((call, at) => (call ? at : -1)).filter((at) => at >= 0);
    return this.pair.every((at) => row.calls[at]) || having.length < 2
      ? this.pair
      : having.slice(0, 2);
  }

  async draw() {
    const row = this.row,
      pair = [...this.pair],
      ids = pair.map((at) => row.calls[at]?.[0]);
    const calls = await Promise.all(
      pair.map((at, side) =>
        ids[side] === undefined ? null : get("/api/call", { key: this.runs[at], id: ids[side] }),
      ),
    );
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
                ? `another context: ${context.kind}, ${count(context.chars)} characters`
                : "no context",
            ),
          ),
        ),
      );
    for (let turn = 0; turn < most; turn++) {
      const turns = calls.map((call) => call.turns[turn]);
      if (turn === parted) {
        rows.push(
          h(
            "p.parting",
            { id: "parting", role: "note" },
            `Here they part, at turn ${turn + 1}: ${why}.`,
          ),
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
            ? "They never part: every turn is the same."
            : "Every turn is the same; the answers differ.",
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

function aligned(sides, same = false) {
  return h(
    "div.aligned",
    { class: same ? "same" : "" },
    sides.map((side) => h("div", null, side)),
  );
}

function callText(label, text) {
  return textOf(text)
    ? h(
        "div.out",
        null,
        h("span.label", null, label),
        textBlock(text, { kind: "output", lines: 8 }),
      )
    : null;
}

// Two texts under a label. Equal ones are folded; of others the words that differ are marked.
function diffRow(label, texts, kind = "output", lines = 3) {
  if (!texts[0] && !texts[1]) return null;
  const same = texts[0] === texts[1],
    sides = same
      ? texts.map((text) => textBlock(text, { kind, lines }))
      : diffTexts(texts[0], texts[1], kind);
  return aligned(
    sides.map((side) =>
      h(
        "div.out",
        { class: same ? "" : "differs" },
        h("span.label", null, same ? `${label}, the same` : label),
        side,
      ),
    ),
    same,
  );
}

function turnRows(turns, index, calls, keys, same) {
  const heads = turns.map((turn, side) =>
    turn
      ? h(
          "header.turn-head",
          null,
          h(
            "a.turn-no",
            {
              href: `${runAddress(keys[side])}/call/${encodeURIComponent(calls[side].id)}/turn/${index + 1}`,
            },
            calls[side].kind === "rlm" ? `turn ${index + 1}` : "request",
          ),
          h(
            "span.turn-facts",
            null,
            `${count(turn.usage.input_tokens)} in, ${count(turn.usage.output_tokens)} out`,
          ),
        )
      : h("div.none", null, "—"),
  );
  const rows = [
    h(
      "div.aligned.turn-row",
      { class: same ? "same" : "" },
      heads.map((head) => h("div", null, head)),
    ),
  ];
  const [left, right] = turns.map(
    (turn) =>
      turn || {
        prompt: [],
        reply: { content: "", reasoning: "", tool_calls: [] },
        cells: [],
        tools: [],
      },
  );
  for (let at = 0; at < Math.max(left.prompt.length, right.prompt.length); at++)
    rows.push(
      promptRow(
        [left, right].map((turn) => turn.prompt[at]),
        index > 0,
      ),
    );
  rows.push(
    diffRow(
      "reasoning",
      [left, right].map((turn) => textOf(turn.reply.reasoning)),
    ),
    diffRow("reply", [left, right].map(proseOf), "reply"),
  );
  rows.push(
    diffRow(
      "tool calls",
      [left, right].map((turn) =>
        turn.reply.tool_calls.map((tool) => `${tool.name}(${textOf(tool.arguments)})`).join("\n"),
      ),
    ),
  );
  for (let at = 0; at < Math.max(left.cells.length, right.cells.length); at++)
    rows.push(...cellRows([left, right].map((turn) => turn.cells[at])));
  return rows;
}

// One message of a prompt. After the first turn it mostly repeats the output above it, so it is
// closed.
function promptRow(messages, isLater) {
  const texts = messages.map((message) => (message ? textOf(message.content) : ""));
  if (texts[0] === texts[1] && messages[0]?.role === messages[1]?.role)
    return aligned(
      messages.map((message) => messageBlock(message, textBlock(texts[0]), "the same", false)),
      true,
    );
  const sides = diffTexts(texts[0], texts[1]),
    words = sizeOfDifference(texts[0], texts[1]);
  return aligned(
    messages.map((message, side) => messageBlock(message, sides[side], words, !isLater)),
  );
}

function messageBlock(message, body, words, open) {
  return message
    ? h(
        "details.message",
        { class: `r-${message.role}`, open },
        h("summary", null, h("b", null, message.role), h("span.quiet", null, ` ${words}`)),
        body,
      )
    : h("div.none", null, "no such message");
}

// The reply without the code that is shown as cells.
function proseOf(turn) {
  const codes = new Set(turn.cells.map((cell) => textOf(cell.code).trim())),
    content = textOf(turn.reply.content);
  if (codes.has(content.trim())) return "";
  return pieces(content)
    .filter((piece) => piece.code === undefined || !codes.has(piece.code.trim()))
    .map((piece) => piece.text ?? piece.code)
    .join("\n\n");
}

function cellRows(cells) {
  const [left, right] = cells.map((cell) => (cell ? textOf(cell.code).replace(/\n+$/, "") : ""));
  const blocks = cells.map((cell) =>
    cell
      ? h(
          "div.cell",
          { class: textOf(cell.error) ? "broken" : "" },
          codeBlock(textOf(cell.code), { error: textOf(cell.error), died: cell.died }),
        )
      : h("div.none", null, "no such cell"),
  );
  if (left !== right && cells[0] && cells[1])
    markDifferences(...blocks.map((block) => block.querySelector(".code code")), [left, right]);
  const text = (name) => cells.map((cell) => (cell ? textOf(cell[name]) : ""));
  return [
    aligned(blocks, left === right),
    diffRow("output", text("stdout")),
    diffRow("value", text("value")),
    diffRow("error", text("error"), "error"),
  ];
}

function answerRow(calls) {
  const texts = calls.map((call) => textOf(call.answer)),
    same = texts[0] === texts[1];
  const sides = same
    ? texts.map((text) => textBlock(text, { kind: "answer-text" }))
    : diffTexts(texts[0], texts[1], "answer-text");
  return aligned(
    calls.map((call, side) =>
      call.has_answer
        ? h("section.answer", null, h("h3", null, "answer"), sides[side])
        : h("p.note", null, textOf(call.error) || stopWords(call.stop)[0]),
    ),
  );
}

// [index, why] of the first turn at which two calls differ, or null.
/** @returns {[number, string] | null} */
export function parting([left, right]) {
  const most = Math.max(left.turns.length, right.turns.length);
  for (let turn = 0; turn < most; turn++) {
    const why = difference(left.turns[turn], right.turns[turn]);
    if (why) return [turn, why];
  }
  return null;
}

// Why two turns differ, or empty. Prompts are compared before replies.
function difference(left, right) {
  if (!left || !right) return "only one of them goes on";
  const prompts = [left, right].map((turn) =>
    JSON.stringify(turn.prompt.map((message) => [message.role, message.content])),
  );
  if (prompts[0] !== prompts[1]) return "they were told something else";
  if (
    textOf(left.reply.content) !== textOf(right.reply.content) ||
    JSON.stringify(left.reply.tool_calls) !== JSON.stringify(right.reply.tool_calls)
  )
    return "the model says something else";
  const out = [left, right].map((turn) =>
    JSON.stringify(turn.cells.map((cell) => [cell.code, cell.stdout, cell.value, cell.error])),
  );
  return out[0] === out[1] ? "" : "the same code gives something else";
}
