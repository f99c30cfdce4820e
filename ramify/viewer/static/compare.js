// Two runs side by side, turn by turn. The first turn that differs is marked.

import { h, fill } from "./dom.js";
import { get } from "./api.js";
import { Run } from "./run.js";
import { codeBlock, textBlock } from "./code.js";
import { pieces, textOf } from "./turn.js";
import { count, dollars, many, moment, number, oneLine, runAddress, seconds, stopWords } from "./format.js";

export async function comparePage(page, keys) {
  const view = new CompareView();
  await view.start(page, keys);
  return view;
}

class CompareView {
  async start(page, keys) {
    document.title = "Compare · Ramify";
    const { runs } = await get("/api/runs"), good = runs.filter((run) => !run.problem);
    if (good.length < 2) return fill(page, h("div.empty", null, h("h1", null, "Compare"), h("p", null, "There are not two runs to compare.")));
    const left = keys[0] || good[0].key, question = good.find((run) => run.key === left)?.question;
    const right = keys[1] || (good.find((run) => run.key !== left && run.question === question) || good.find((run) => run.key !== left)).key;
    const choose = (chosen, label, go) => {
      const select = h("select", { "aria-label": label, onchange: () => go(select.value) },
        good.map((run) => h("option", { value: run.key, selected: run.key === chosen }, `${moment(run.started_at)} · ${oneLine(run.question || run.id, 50)}${run.reward === undefined || run.reward === null ? "" : ` · ${number(run.reward)}`}`)));
      return select;
    };
    const go = (a, b) => (location.hash = `#/compare/${encodeURIComponent(a)}/${encodeURIComponent(b)}`);
    this.body = h("div.compared");
    fill(page, h("div.wide", null, h("div.wide-head", null, h("h1", null, "Compare"),
      h("div.choose", null, choose(left, "left run", (key) => go(key, right)), choose(right, "right run", (key) => go(left, key)))), this.body));
    await this.load(left, right);
  }

  async load(left, right) {
    const sides = await Promise.all([left, right].map(async (key) => ({ key, run: new Run(await get("/api/run", { key })) })));
    const shared = sides[0].run.calls.filter((call) => call.kind === "rlm" && sides[1].run.indexOf(call.id) >= 0).map((call) => call.id);
    if (!shared.length) return fill(this.body, sides.flatMap((side) => side.run.head.problems.map((text) => h("p.problem", null, text))), h("p.note", null, "The runs have no session in common."));
    this.sides = sides;
    this.calls = h("select", { "aria-label": "which call", onchange: () => this.draw(this.calls.value) }, shared.map((id) => h("option", { value: id }, `call ${id}`)));
    this.pair = h("div.pair");
    fill(this.body, sides.flatMap((side) => side.run.head.problems.map((text) => h("p.problem", null, text))), shared.length > 1 ? h("p", null, this.calls) : null, this.pair);
    await this.draw(shared[0]);
  }

  async draw(id) {
    const calls = await Promise.all(this.sides.map((side) => get("/api/call", { key: side.key, id })));
    const most = Math.max(...calls.map((call) => call.turns.length)), rows = [];
    let parted = -1;
    for (let turn = 0; turn < most; turn++) {
      const turns = calls.map((call) => call.turns[turn]), why = parted < 0 ? difference(turns[0], turns[1]) : "";
      if (why) {
        parted = turn;
        rows.push(h("p.parting", { id: "parting", role: "note" }, `Here they part, at turn ${turn + 1}: ${why}.`));
      }
      rows.push(h("div.aligned", { class: parted < 0 ? "same" : "" }, turns.map((each, side) => this.turn(each, turn, this.sides[side].key, id))));
    }
    if (parted < 0) rows.push(h("p.note", null, calls[0].answer === calls[1].answer ? "They never part: every turn is the same." : "Every turn is the same; the answers differ."));
    rows.push(h("div.aligned", null, calls.map((call) => h("div", null, call.has_answer ? h("section.answer", null, h("h3", null, "answer"), textBlock(call.answer, { kind: "answer-text" })) : h("p.note", null, stopWords(call.stop)[0])))));
    fill(this.pair, this.sides.map((side, index) => this.sideHead(side, calls[index])), rows);
    if (parted > 0) document.getElementById("parting")?.scrollIntoView({ block: "center" });
  }

  sideHead(side, call) {
    const head = side.run.head, [words, tone] = stopWords(head.stop, head.alive);
    const rewards = Object.entries(head.rewards).map(([name, value]) => `${name} ${number(value)}`);
    return h("div.side-head", null, h("h2", null, h("a", { href: runAddress(side.key) }, oneLine(head.question, 90)), " ", h("span", { class: `badge ${tone}` }, words)),
      h("p.quiet", null, [call.model, many(call.num_turns, "turn"), many(head.num_calls, "call"), `${count(head.usage.input_tokens + head.usage.output_tokens)} tokens`, dollars(head.cost), seconds(head.seconds), ...rewards].join(" · ")));
  }

  turn(turn, index, key, id) {
    if (!turn) return h("div.none", null, "—");
    const cells = [...turn.cells];
    const parts = pieces(textOf(turn.reply.content)).map((piece) => {
      if (piece.code === undefined) return textBlock(piece.text, { kind: "reply" });
      const at = cells.findIndex((cell) => textOf(cell.code).trim() === piece.code.trim());
      return at < 0 ? codeBlock(piece.code) : cellBlock(cells.splice(at, 1)[0]);
    });
    return h("div", null, h("section.turn", null, h("header.turn-head", null,
      h("a.turn-no", { href: `${runAddress(key)}/call/${encodeURIComponent(id)}/turn/${index + 1}` }, `turn ${index + 1}`),
      h("span.turn-facts", null, `${count(turn.usage.input_tokens)} in, ${count(turn.usage.output_tokens)} out`)), parts, cells.map(cellBlock)));
  }
}

function cellBlock(cell) {
  const error = textOf(cell.error);
  return h("div.cell", { class: error ? "broken" : "" }, codeBlock(textOf(cell.code), { error, died: cell.died }),
    textOf(cell.stdout) ? h("div.out", null, textBlock(cell.stdout, { kind: "output", lines: 8 })) : null,
    cell.has_value ? h("div.out", null, textBlock(cell.value, { kind: "output", lines: 4 })) : null);
}

// Why two turns differ, or empty. Prompts are compared before replies.
function difference(left, right) {
  if (!left || !right) return "only one of them goes on";
  const prompts = [left, right].map((turn) => JSON.stringify(turn.prompt.map((message) => [message.role, message.content])));
  if (prompts[0] !== prompts[1]) return "they were told something else";
  if (textOf(left.reply.content) !== textOf(right.reply.content) || JSON.stringify(left.reply.tool_calls) !== JSON.stringify(right.reply.tool_calls)) return "the model says something else";
  const out = [left, right].map((turn) => JSON.stringify(turn.cells.map((cell) => [cell.code, cell.stdout, cell.value, cell.error])));
  return out[0] === out[1] ? "" : "the same code gives something else";
}
