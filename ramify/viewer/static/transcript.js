// One call, turn by turn: what it was told, what it said, its code with output and errors, its sub-calls where they
// happened. While the run goes on only what is new is fetched, and only what changed is made anew.

import { h, fill, copy } from "./dom.js";
import { get, offline } from "./api.js";
import { codeBlock, textBlock, errorLine } from "./code.js";
import { count, dollars, many, number, oneLine, seconds, stopWords } from "./format.js";
import { tokenStrip } from "./tokens.js";

const FEW = 4;  // plain sub-calls of a cell that are shown one by one

export class Transcript {
  // run: the page's model; actions: { address(call, turn), open(index), showOnly(indices, words) }
  constructor(run, actions) {
    this.run = run;
    this.actions = actions;
    this.head = h("div.call-head");
    this.turns = h("div.turns");
    this.foot = h("div.call-foot");
    this.element = h("article.transcript", { tabindex: "-1", "aria-label": "transcript" }, this.head, this.turns, this.foot);
    this.id = null;
  }

  // --- which call -----------------------------------------------------------------------------------------------

  async show(id, turn = null) {
    if (this.id !== id) {
      this.id = id;
      this.call = null;
      this.parts = [];      // turn -> { element, json, places: cell -> element }
      this.row = this.run.indexOf(id);
      fill(this.head, h("p.quiet", null, "Loading …"));
      fill(this.turns);
      fill(this.foot);
      this.element.scrollTop = 0;
    }
    await this.load(0);
    if (turn !== null) this.scrollTo(turn);
  }

  async load(from) {
    const id = this.id;
    if (this.loading) {
      this.again = true;
      return this.loading;
    }
    this.loading = (async () => {
      try {
        const call = await get("/api/call", { key: this.run.head.key, id, from });
        if (id === this.id) this.apply(call);
      } catch (error) {
        if (id === this.id) fill(this.head, h("p.problem", null, error.message));
      } finally {
        this.loading = null;
      }
    })();
    await this.loading;
    if (this.again) {
      this.again = false;
      await this.load(id === this.id && this.call ? Math.max(0, this.call.turns.length - 1) : 0);
    }
  }

  // Rows of the run changed: this call's own, or those of its sub-calls.
  changed(indices) {
    if (this.id === null || !this.call) return;
    const children = new Set();
    for (const index of indices) {
      const call = this.run.calls[index];
      if (index === this.row) this.load(Math.max(0, this.call.turns.length - 1));
      else if (call.parent === this.row) children.add(`${call.turn}/${call.cell}`);
    }
    if (children.size) this.drawSubcalls(children);
  }

  apply(call) {
    const known = this.call ? this.call.turns.slice(0, call.first_turn) : [];
    this.call = { ...call, turns: [...known, ...call.turns] };
    this.drawHead();
    for (const turn of call.turns) this.drawTurn(turn);
    this.drawPending();
    this.drawFoot();
  }

  full(pick) {
    if (offline) return async () => null;
    return async () => pick(await get("/api/call", { key: this.run.head.key, id: this.call.id, full: 1 }));
  }

  // --- head and foot --------------------------------------------------------------------------------------------

  drawHead() {
    const call = this.call, [words, tone] = stopWords(call.stop, this.run.alive && this.run.calls[this.row]?.state !== "done");
    const took = (call.ended_s ?? this.run.now()) - call.started_s;
    const facts = [
      ["model", call.model], ["took", call.stop || !this.run.alive ? seconds(took) : "…"], ["turns", number(call.num_turns)], ["in", count(call.usage.input_tokens)],
      ["out", count(call.usage.output_tokens)], ["cost", dollars(call.cost)],
      ...(call.usage.cached_tokens ? [["cached", count(call.usage.cached_tokens)]] : []),
      ...(call.context ? [["context", `${call.context.kind}, ${count(call.context.chars)} chars`]] : []),
      ...Object.entries(call.rewards).map(([name, value]) => [name, number(value)]),
    ];
    const signature = JSON.stringify([facts, words, call.id, call.question]);
    if (signature === this.headSignature && this.head.querySelector("h2")) return;
    this.headSignature = signature;
    fill(this.head,
      h("div.crumbs", null, this.crumbs(), h("span", { class: `badge k-${call.kind}` }, call.kind), h("span", { class: `badge ${tone}` }, words)),
      h("h2", null, oneLine(typeof call.question === "string" ? call.question : call.question.text, 300) || "(no question)"),
      h("dl.facts", null, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
      call.fork ? h("p.note", null, call.fork.turn >= 0 ? `goes on from turn ${call.fork.turn + 1} of ` : "a branch beside ",
        h("a", { href: this.actions.address(call.fork.call, Math.max(0, call.fork.turn)) }, `call ${call.fork.call}`)) : null);
  }

  crumbs() {
    const line = [];
    for (let at = this.row; at >= 0; at = this.run.calls[at].parent) line.unshift(this.run.calls[at]);
    return line.map((call, index) => [
      index ? h("span.quiet", null, "›") : null,
      index === line.length - 1 ? h("b", null, `call ${call.id}`) : h("a", { href: this.actions.address(call.id, line[index + 1]?.turn ?? null) }, call.id),
    ]);
  }

  drawFoot() {
    const call = this.call, notes = call.notes.filter((note) => note.turn >= call.num_turns && !call.pending);
    const signature = JSON.stringify([call.answer, call.error, call.stop, notes, this.run.alive]);
    if (signature === this.footSignature && this.footOf === call.id) return;
    [this.footSignature, this.footOf] = [signature, call.id];
    const parts = [notes.map(noteLine)];
    if (call.error) parts.push(h("section.answer.failed", null, h("h3", null, "failed"), textBlock(call.error, { kind: "error", whole: this.full((it) => it.error) })));
    if (call.has_answer) {
      const text = typeof call.answer === "string" ? call.answer : call.answer.text;
      parts.push(h("section.answer", null, h("h3", null, call.stop === "final" || !call.stop ? "answer" : `answer, as far as it got (${stopWords(call.stop)[0]})`,
        h("button.copy", { type: "button", onclick: () => copy(text, "answer") }, "copy")),
        textBlock(call.answer, { kind: "answer-text", lines: 30, whole: this.full((it) => it.answer) })));
    } else if (call.stop && !call.error) parts.push(h("p.note", null, `ended without an answer: ${stopWords(call.stop)[0]}`));
    else if (!call.stop && !this.run.alive) parts.push(h("p.note", null, "was cut off here: the run's process ended"));
    fill(this.foot, parts);
  }

  // --- turns ----------------------------------------------------------------------------------------------------

  drawTurn(turn) {
    const json = JSON.stringify([turn, this.call.notes.filter((note) => note.turn === turn.index)]);
    const known = this.parts[turn.index];
    if (known && known.json === json) return;
    const part = { json, places: new Map() };
    part.element = this.turnElement(turn, part);
    if (known) known.element.replaceWith(part.element);
    else this.turns.append(part.element);
    this.parts[turn.index] = part;
    for (let cell = turn.cells.length; this.run.made(this.row, turn.index, cell).length; cell++) this.drawEarly(turn.index, cell);
  }

  turnElement(turn, part) {
    const plain = this.call.kind !== "rlm" && this.call.num_turns <= 1;
    const facts = [
      turn.asked_s === null ? null : `at ${seconds(turn.asked_s)}`, `${seconds(turn.seconds)} asking`,
      `${count(turn.usage.input_tokens)} in, ${count(turn.usage.output_tokens)} out`, turn.cost ? dollars(turn.cost) : null,
      turn.finish !== "stop" ? turn.finish : null,
    ].filter(Boolean);
    const strip = h("div.strip-holder");
    return h("section.turn", { id: `turn-${turn.index}`, "data-turn": String(turn.index), tabindex: "-1" },
      h("header.turn-head", null,
        h("a.turn-no", { href: this.actions.address(this.call.id, turn.index), title: "link to this turn" }, plain ? "request" : `turn ${turn.index + 1}`),
        h("span.turn-facts", null, facts.join(" · ")),
        turn.num_sampled ? h("button.small", { type: "button", onclick: () => tokenStrip(strip, this.run.head.key, this.call.id, turn.index) }, `${count(turn.num_sampled)} tokens`) : null),
      this.call.notes.filter((note) => note.turn === turn.index).map(noteLine),
      this.kept(turn), this.told(turn), this.said(turn, part), strip);
  }

  // What of the conversation so far this prompt begins with: folded away, since it stands above.
  kept(turn) {
    if (!turn.reused) return null;
    const before = turn.index ? this.call.turns[turn.index - 1] : null;
    const all = before ? before.reused + before.prompt.length + 1 : turn.reused;
    const words = turn.reused < all ? `history was compacted: ${turn.reused} of ${many(all, "message")} kept` : `${many(turn.reused, "earlier message")} kept`;
    const details = h("details.kept", { class: turn.reused < all ? "warned" : "" }, h("summary", null, words));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(h("ol", null, this.messagesBefore(turn).slice(0, turn.reused).map(messageLine)));
    });
    return details;
  }

  messagesBefore(turn) {
    let messages = [];
    for (const each of this.call.turns.slice(0, turn.index)) {
      while (messages.length < each.reused) messages.push({ role: "…", content: `in call ${this.call.fork ? this.call.fork.call : "before"}` });
      messages = [...messages.slice(0, each.reused), ...each.prompt, each.reply];
    }
    while (messages.length < turn.reused) messages.push({ role: "…", content: `in call ${this.call.fork ? this.call.fork.call : "before"}` });
    return messages;
  }

  told(turn) {
    const before = turn.index ? this.call.turns[turn.index - 1] : null;
    return turn.prompt.map((message, index) => {
      const size = typeof message.content === "string" ? message.content.length : message.content.chars;
      const whole = this.full((it) => it.turns[turn.index].prompt[index].content);
      const seen = before && before.cells.length && message.role !== "system";  // it repeats what the cells printed
      const open = message.role !== "system" && !seen;
      const words = seen ? "observation" : message.role;
      return h("details.message", { class: `r-${message.role}`, open },
        h("summary", null, h("b", null, words), h("span.quiet", null, ` ${many(size, "character")}${seen ? `: ${oneLine(textOf(message.content), 90)}` : ""}`)),
        textBlock(message.content, { whole }));
    });
  }

  said(turn, part) {
    const reply = turn.reply, parts = [], cells = turn.cells.map((cell, index) => ({ cell, index, used: false }));
    if (textOf(reply.reasoning)) {
      parts.push(h("details.message.reasoning", null, h("summary", null, h("b", null, "reasoning"), h("span.quiet", null, ` ${oneLine(textOf(reply.reasoning), 90)}`)),
        textBlock(reply.reasoning, { lines: 40, whole: this.full((it) => it.turns[turn.index].reply.reasoning) })));
    }
    const place = (wanted) => {
      const found = cells.find((each) => !each.used && textOf(each.cell.code).trim() === wanted.trim());
      if (found) found.used = true;
      return found ? this.cellElement(turn, found.cell, found.index, part) : null;
    };
    const raw = turn.cells.length ? place(textOf(reply.content)) : null;  // where replies are code and nothing else
    if (raw) parts.push(raw);
    else if (typeof reply.content !== "string") parts.push(textBlock(reply.content, { kind: "reply", lines: 40, whole: this.full((it) => it.turns[turn.index].reply.content) }));
    else {
      for (const piece of pieces(reply.content)) {
        if (piece.code === undefined) parts.push(textBlock(piece.text, { kind: "reply", lines: 60 }));
        else parts.push(place(piece.code) || codeBlock(piece.code, { label: piece.language || "text" }));
      }
    }
    for (const tool of reply.tool_calls) parts.push(h("p.tool-call", null, h("b", null, `${tool.name}(`), oneLine(textOf(tool.arguments), 400), h("b", null, ")")));
    for (const each of cells) if (!each.used) parts.push(this.cellElement(turn, each.cell, each.index, part));
    return parts;
  }

  cellElement(turn, cell, index, part) {
    const error = textOf(cell.error), code = textOf(cell.code), whole = (name) => this.full((it) => it.turns[turn.index].cells[index][name]);
    const place = h("div.subcalls");
    part.places.set(index, place);
    this.fillSubcalls(place, turn.index, index);
    const cut = cell.stdout_chars > cell.shown_chars;
    const facts = [turn.cells.length > 1 ? `cell ${index + 1}` : "", `ran ${seconds(cell.seconds)}`].filter(Boolean).join(" · ");
    return h("div.cell", { class: error ? "broken" : "", "data-cell": String(index) },
      codeBlock(code, { error, died: cell.died }),
      place,
      textOf(cell.stdout) ? h("div.out", null, h("span.label", null, "output"), textBlock(cell.stdout, { kind: "output", whole: whole("stdout") })) : null,
      cut ? h("p.note", null, `${cell.stdout_chars.toLocaleString("en-US")} characters were printed; the model saw ${cell.shown_chars.toLocaleString("en-US")} of them`) : null,
      cell.has_value ? h("div.out", null, h("span.label", null, "value"), textBlock(cell.value, { kind: "output", whole: whole("value") })) : null,
      error ? h("details.trace", { open: !errorLine(error) }, h("summary", null, cell.died ? "the session died" : "traceback"), textBlock(cell.error, { kind: "error", whole: whole("error") })) : null,
      cell.restored.length ? h("p.note", null, `reserved names were put back: ${cell.restored.join(", ")}`) : null,
      h("div.cell-facts", null, facts));
  }

  drawPending() {
    const asked = this.call.pending;
    if (this.waiting) this.waiting.remove();
    this.waiting = null;
    if (!asked || this.call.stop) return;
    const late = this.call.notes.filter((note) => note.turn === asked.turn);
    this.waiting = h("section.turn.pending", { id: `turn-${asked.turn}` },
      h("header.turn-head", null, h("span.turn-no", null, this.call.kind === "rlm" ? `turn ${asked.turn + 1}` : "request"),
        h("span.turn-facts", null, this.run.alive ? h("span.live", null, "asking the model …") : "was asking the model when the run was cut off")),
      late.map(noteLine), this.told({ index: asked.turn, prompt: asked.prompt }));
    this.turns.append(this.waiting);
  }

  // --- sub-calls ------------------------------------------------------------------------------------------------

  drawSubcalls(keys) {
    for (const key of keys) {
      const [turn, cell] = key.split("/").map(Number), place = this.parts[turn]?.places.get(cell);
      if (place) this.fillSubcalls(place, turn, cell);
      else if (this.call.turns[turn]) this.drawEarly(turn, cell);
    }
  }

  // Sub-calls of a cell that has not ended: it is not in the journal yet, but what it asked is.
  drawEarly(turn, cell) {
    const part = this.parts[turn];
    const place = h("div.subcalls");
    part.places.set(cell, place);
    this.fillSubcalls(place, turn, cell);
    part.element.append(h("div.cell.early", null, place));
  }

  fillSubcalls(place, turn, cell) {
    const indices = this.run.made(this.row, turn, cell);
    if (!indices.length) return;
    const calls = indices.map((index) => [index, this.run.calls[index]]);
    const plain = calls.filter(([, call]) => call.kind !== "rlm"), deep = calls.filter(([, call]) => call.kind === "rlm");
    const failed = plain.filter(([, call]) => call.stop === "error");
    const shown = plain.length <= FEW + 2 ? plain : [...new Set([...plain.slice(0, FEW - 1), ...failed.slice(0, 2)])];
    const rows = [...shown, ...deep.slice(0, 40)].map(([index, call]) => this.subcall(index, call));
    if (shown.length < plain.length || deep.length > 40) {
      const done = plain.filter(([, call]) => call.stop !== null).length;
      const words = [`${many(calls.length, "sub-call")}: ${(done + deep.filter(([, call]) => call.stop !== null).length).toLocaleString("en-US")} done`, failed.length ? `${failed.length} failed` : ""].filter(Boolean).join(", ");
      rows.push(h("button.sub.all", { type: "button", onclick: () => this.actions.showOnly(indices, `sub-calls of turn ${turn + 1}`) }, `${words} — list them all`));
    }
    fill(place, rows);
  }

  subcall(index, call) {
    const [words, tone] = stopWords(call.stop, this.run.alive);
    const came = call.stop === "error" ? call.error : call.stop ? call.answer : call.state === "asking" ? "asking …" : "…";
    return h("a.sub", { href: this.actions.address(call.id, null), "data-call": call.id },
      h("i", { class: `dot k-${call.kind}` }), h("span.id", null, call.id),
      h("span.asked", null, oneLine(call.question, 160)), h("span.came", { class: call.stop === "error" ? "bad" : "" }, oneLine(came || words, 160)),
      h("span.took", null, call.ended_s === null ? words : seconds(call.ended_s - call.started_s)),
      call.stop && call.stop !== "final" && call.stop !== "error" ? h("span", { class: `mark ${tone}` }, words) : null);
  }

  // --- moving about ---------------------------------------------------------------------------------------------

  scrollTo(turn) {
    const element = this.turns.querySelector(`[data-turn="${Number(turn)}"]`);
    if (!element) return;
    // Turns out of sight have estimated heights, so the place moves as those on the way are laid out.
    let tries = 6;
    const settle = () => {
      element.scrollIntoView({ block: "start" });
      if (--tries && element.isConnected) requestAnimationFrame(settle);
    };
    settle();
    element.classList.add("pointed");
    setTimeout(() => element.classList.remove("pointed"), 1500);
  }

  // The turn at the top of what is in sight, by `step` further.
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
    return this.element.scrollHeight > this.element.clientHeight + 1 ? this.element : { getBoundingClientRect: () => ({ top: 0 }) };
  }

  firstCode() {
    const found = this.element.querySelector(".turn:focus .code code, .turn:focus-within .code code") || this.element.querySelector(".code code");
    return found ? this.call.turns.flatMap((turn) => turn.cells).map((cell) => textOf(cell.code))[0] : "";
  }
}

function textOf(value) {
  return typeof value === "string" ? value : value ? value.text : "";
}

function noteLine(note) {
  return h("p.note", { class: note.kind === "attempt" ? "warned" : "" }, h("span.quiet", null, `${seconds(note.at_s)} `), note.kind === "attempt" ? `an attempt failed: ${note.text}` : note.text);
}

function messageLine(message) {
  return h("li", null, h("b", null, message.role), ` ${oneLine(textOf(message.content), 220)}`);
}

// A reply as prose and fenced code, in order.
export function pieces(content) {
  const found = [], fence = /^[ \t]*(```+|~~~+)[ \t]*([\w.+-]*)[^\n`]*\n([\s\S]*?)(?:^[ \t]*\1[ \t]*$|(?![\s\S]))/gm;
  let at = 0;
  for (const match of content.matchAll(fence)) {
    if (content.slice(at, match.index).trim()) found.push({ text: content.slice(at, match.index).trim() });
    found.push({ code: match[3].replace(/\n$/, ""), language: match[2] });
    at = match.index + match[0].length;
  }
  if (content.slice(at).trim()) found.push({ text: content.slice(at).trim() });
  return found;
}
