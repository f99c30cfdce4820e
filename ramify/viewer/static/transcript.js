// Transcript of one call, turn by turn: prompts, replies, code with output and errors, and sub-
// calls. While the run is in progress, only new turns are fetched, and only changed elements are
// rebuilt.

import { get, load, offline } from "./api.js";
import { ArrivingReply } from "./arriving.js";
import { format, textBlock } from "./code.js";
import { copy, fill, h, toast } from "./dom.js";
import { count, dollars, hasMarkup, number, oneLine, seconds, stopWords } from "./format.js";
import { Provenance } from "./provenance.js";
import { fillSubcalls } from "./subcalls.js";
import { marksOf, noteLine, textOf, told, turnElement } from "./turn.js";

export class Transcript {
  // run: the page's model; actions: { address(call, turn), go(call), showOnly(indices, words) }
  constructor(run, actions) {
    this.run = run;
    this.actions = actions;
    this.head = h("div.call-head");
    this.beside = h("section.sibling-code", {
      hidden: true,
      "aria-label": "its code and its siblings'",
    });
    this.turns = h("div.turns");
    this.foot = h("div.call-foot");
    this.element = h(
      "article.transcript",
      { tabindex: "-1", "aria-label": "transcript" },
      this.head,
      this.beside,
      this.turns,
      this.foot,
    );
    this.provenance = new Provenance(this, actions.go);
    this.arriving = new ArrivingReply();
    this.id = null;
    this.wanted = null; // first turn to fetch
    this.loading = null;
    this.footSignature = "";
    this.footOf = ""; // the call whose foot is drawn
  }

  // --- which call --------------------------------------------------------------------------------

  async show(id, turn = null) {
    if (this.id !== id) {
      this.id = id;
      this.call = null;
      this.parts = []; // turn -> { element, json, places: cell -> element }
      this.row = this.run.indexOf(id);
      fill(this.head, h("p.quiet", null, "Loading …"));
      fill(this.turns);
      fill(this.foot);
      this.besides = "";
      this.beside.hidden = true;
      this.waiting = null;
      this.element.scrollTop = 0;
    }
    await this.load(0);
    if (turn !== null) this.scrollTo(turn);
  }

  // One request at a time. A request made meanwhile may need newer data than the pending answer, so
  // it is sent afterwards, from the earliest turn that was requested.
  load(from) {
    this.wanted = Math.min(from, this.wanted ?? from);
    this.loading ??= this.fetch();
    return this.loading;
  }

  async fetch() {
    while (this.wanted !== null) {
      const id = this.id,
        from = this.call ? this.wanted : 0;
      this.wanted = null;
      try {
        const call = await get("/api/call", { key: this.run.head.key, id, from });
        if (id === this.id) this.apply(call);
      } catch (error) {
        if (id === this.id) fill(this.head, h("p.problem", null, error.message));
      }
    }
    this.loading = null;
  }

  // Calls of the run changed: this call, or its sub-calls.
  changed(indices) {
    if (this.id === null) return;
    if (!this.call) return void this.load(0);
    const children = new Set();
    for (const index of indices) {
      const call = this.run.calls[index];
      if (index === this.row)
        // a score may belong to any turn
        this.load(call.stop === null ? Math.max(0, this.call.turns.length - 1) : 0);
      else if (call.parent === this.row) children.add(`${call.turn}/${call.cell}`);
    }
    this.drawBeside();
    if (children.size) this.drawSubcalls(children);
  }

  apply(call) {
    const known = this.call ? this.call.turns.slice(0, call.first_turn) : [];
    this.call = { ...call, turns: [...known, ...call.turns] };
    this.drawHead();
    for (const turn of call.turns) this.drawTurn(turn);
    this.drawPending();
    this.drawFoot();
    this.drawBeside();
    this.provenance.load();
  }

  // For a session that differs from its siblings: its code against theirs.
  async drawBeside() {
    const id = this.id,
      call = this.run.calls[this.row];
    if (call.kind !== "rlm" || !call.outlier || this.besides === id) return;
    this.besides = id;
    try {
      await (await load("sibling_code"))(this.beside, this, id);
    } catch (error) {
      toast(error.message);
    }
  }

  full(pick) {
    if (offline) return async () => null;
    return async () =>
      pick(await get("/api/call", { key: this.run.head.key, id: this.call.id, full: 1 }));
  }

  // --- head and foot -----------------------------------------------------------------------------

  drawHead() {
    const call = this.call,
      [words, tone] = stopWords(
        call.stop,
        this.run.alive && this.run.calls[this.row]?.state !== "done",
      );
    const took = (call.ended_s ?? this.run.now()) - call.started_s;
    const facts = [
      ["model", call.model],
      ["took", call.stop || !this.run.alive ? seconds(took) : "…"],
      ["turns", number(call.num_turns)],
      ["in", count(call.usage.input_tokens)],
      ["out", count(call.usage.output_tokens)],
      ["cost", dollars(call.cost)],
      ...(call.usage.cached_tokens ? [["cached", count(call.usage.cached_tokens)]] : []),
      ...(call.context
        ? [["context", `${call.context.kind}, ${count(call.context.chars)} chars`]]
        : []),
      ...(call.context?.by_reference ? [["stored", call.context.by_reference]] : []),
      ...(call.cause ? [["started as", call.cause]] : []),
      ...Object.entries(call.rewards).map(([name, value]) => [`reward: ${name}`, number(value)]),
    ];
    const outlier = this.run.calls[this.row]?.outlier ?? "";
    const signature = JSON.stringify([facts, words, call.id, call.question, call.marks, outlier]);
    if (signature === this.headSignature && this.head.querySelector("h2")) return;
    this.headSignature = signature;
    fill(
      this.head,
      h(
        "div.crumbs",
        null,
        this.crumbs(),
        h("span", { class: `badge k-${call.kind}` }, call.kind),
        h("span", { class: `badge ${tone}` }, words),
      ),
      h(
        "h2",
        { "data-whole": call.question === oneLine(textOf(call.question), 300) },
        oneLine(textOf(call.question), 300) || "(no question)",
      ),
      outlier ? h("p.differs", { class: call.error ? "bad" : "" }, outlier) : null,
      h(
        "dl.facts",
        null,
        facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
      ),
      marksOf(call.marks),
      call.fork
        ? h(
            "p.note",
            null,
            call.fork.turn >= 0
              ? `continues from turn ${call.fork.turn + 1} of `
              : "a branch alongside ",
            h(
              "a",
              { href: this.actions.address(call.fork.call, Math.max(0, call.fork.turn)) },
              `call ${call.fork.call}`,
            ),
          )
        : null,
    );
  }

  crumbs() {
    const line = [];
    for (let at = this.row; at >= 0; at = this.run.calls[at].parent)
      line.unshift(this.run.calls[at]);
    return line.map((call, index) => [
      index ? h("span.quiet", null, "›") : null,
      index === line.length - 1
        ? h("b", null, `call ${call.id}`)
        : h("a", { href: this.actions.address(call.id, line[index + 1]?.turn ?? null) }, call.id),
    ]);
  }

  drawFoot() {
    const call = this.call,
      notes = call.notes.filter((note) => note.turn >= call.num_turns && !call.pending);
    const signature = JSON.stringify([call.answer, call.error, call.stop, notes, this.run.alive]);
    if (signature === this.footSignature && this.footOf === call.id) return;
    [this.footSignature, this.footOf] = [signature, call.id];
    const parts = [notes.map(noteLine)];
    if (call.error)
      parts.push(
        h(
          "section.answer.failed",
          null,
          h("h3", null, "failed"),
          textBlock(call.error, { kind: "error", whole: this.full((it) => it.error) }),
        ),
      );
    if (call.has_answer) {
      const text = typeof call.answer === "string" ? call.answer : call.answer.text;
      parts.push(
        h(
          "section.answer",
          null,
          h(
            "h3",
            null,
            call.stop === "final" || !call.stop
              ? "answer"
              : `partial answer (${stopWords(call.stop)[0]})`,
            h("button.copy", { type: "button", onclick: () => copy(text, "answer") }, "copy"),
          ),
          textBlock(call.answer, {
            kind: "answer-text",
            lines: 30,
            whole: this.full((it) => it.answer),
          }),
        ),
      );
    } else if (call.stop && !call.error)
      parts.push(h("p.note", null, `ended without an answer: ${stopWords(call.stop)[0]}`));
    else if (!call.stop && !this.run.alive)
      parts.push(h("p.note", null, "interrupted here: the run's process ended"));
    fill(this.foot, parts);
    const said = this.foot.querySelector(".said.answer-text");
    const plain = said?.textContent;
    // Its links are drawn again: their places are those of the plain text.
    if (plain && hasMarkup(plain)) format(said, plain, () => this.provenance.redraw(said, plain));
  }

  // --- turns -------------------------------------------------------------------------------------

  drawTurn(turn) {
    const json = JSON.stringify([turn, this.call.notes.filter((note) => note.turn === turn.index)]);
    const known = this.parts[turn.index];
    if (known && known.json === json) return;
    const part = { json, places: new Map() };
    part.element = turnElement(this, turn, part);
    if (known) known.element.replaceWith(part.element);
    else this.turns.append(part.element);
    this.parts[turn.index] = part;
    for (let cell = turn.cells.length; this.run.made(this.row, turn.index, cell).length; cell++)
      this.drawEarly(turn.index, cell);
  }

  drawPending() {
    const asked = this.call.pending;
    if (this.waiting) this.waiting.remove();
    this.waiting = null;
    if (!asked || this.call.stop) return void this.arriving.leave();
    const late = this.call.notes.filter((note) => note.turn === asked.turn);
    this.waiting = h(
      "section.turn.pending",
      { id: `turn-${asked.turn}` },
      h(
        "header.turn-head",
        null,
        h("span.turn-no", null, this.call.kind === "rlm" ? `turn ${asked.turn + 1}` : "request"),
        h(
          "span.turn-facts",
          null,
          this.run.alive
            ? h("span.live", null, "asking the model …")
            : "was waiting for the model when the run was interrupted",
        ),
      ),
      late.map(noteLine),
      told(this, { index: asked.turn, prompt: asked.prompt }),
      this.arriving.element,
    );
    this.turns.append(this.waiting);
    this.arriving.show(this.id, asked.turn);
  }

  // Replies of any calls that have arrived in part.
  arrive(replies) {
    this.arriving.take(replies);
    if (this.waiting) this.arriving.show(this.id, this.call.pending.turn);
  }

  // --- sub-calls ---------------------------------------------------------------------------------

  drawSubcalls(keys) {
    for (const key of keys) {
      const [turn, cell] = key.split("/").map(Number),
        place = this.parts[turn]?.places.get(cell);
      if (place) fillSubcalls(this, place, turn, cell);
      else if (this.call.turns[turn]) this.drawEarly(turn, cell);
    }
  }

  // Sub-calls of a cell that is still running: the cell is not in the journal yet, but they are.
  drawEarly(turn, cell) {
    const part = this.parts[turn];
    const place = h("div.subcalls");
    part.places.set(cell, place);
    fillSubcalls(this, place, turn, cell);
    part.element.append(h("div.cell.early", null, place));
  }

  // --- navigation --------------------------------------------------------------------------------

  scrollTo(turn) {
    const element = this.turns.querySelector(`[data-turn="${Number(turn)}"]`);
    if (!element) return;
    // Hidden turns have estimated heights, so the position shifts while they are laid out.
    let tries = 6;
    const settle = () => {
      element.scrollIntoView({ block: "start" });
      if (--tries && element.isConnected) requestAnimationFrame(settle);
    };
    settle();
    element.classList.add("pointed");
    setTimeout(() => element.classList.remove("pointed"), 1500);
  }

  // Move by `step` turns from the topmost visible turn.
  step(step) {
    const turns = [...this.turns.querySelectorAll(".turn")];
    if (!turns.length) return;
    const top = this.scroller().getBoundingClientRect?.().top ?? 0;
    let at = turns.findIndex((each) => each.getBoundingClientRect().bottom > top + 40);
    if (at < 0) at = turns.length - 1;
    const wanted = turns[Math.min(turns.length - 1, Math.max(0, at + step))];
    wanted.scrollIntoView({ block: "start" });
    wanted.focus({ preventScroll: true });
  }

  nextError() {
    const broken = [...this.element.querySelectorAll(".broken, .sub .bad")];
    if (!broken.length) return false;
    this.errorAt = ((this.errorAt ?? -1) + 1) % broken.length;
    broken[this.errorAt].scrollIntoView({ block: "center" });
    return true;
  }

  scroller() {
    return this.element.scrollHeight > this.element.clientHeight + 1
      ? this.element
      : { getBoundingClientRect: () => ({ top: 0 }) };
  }

  firstCode() {
    const found =
      this.element.querySelector(".turn:focus .code code, .turn:focus-within .code code") ||
      this.element.querySelector(".code code");
    return found
      ? this.call.turns.flatMap((turn) => turn.cells).map((cell) => textOf(cell.code))[0]
      : "";
  }
}
