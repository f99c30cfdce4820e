// Two calls side by side, row by row: prompts, replies, code, output and answers. What is the same is
// closed; of other texts the words that differ are marked.

import { codeBlock, textBlock } from "./code.js";
import { diffTexts, markDifferences, sizeOfDifference } from "./diff.js";
import { h } from "./dom.js";
import { count, runAddress, stopWords } from "./format.js";
import { pieces, textOf } from "./turn.js";

export function aligned(sides, same = false) {
  return h(
    "div.aligned",
    { class: same ? "same" : "" },
    sides.map((side) => h("div", null, side)),
  );
}

export function callText(label, text) {
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
export function diffRow(label, texts, kind = "output", lines = 3) {
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
        h("span.label", null, same ? `${label} (identical)` : label),
        side,
      ),
    ),
    same,
  );
}

export function turnRows(turns, index, calls, keys, same) {
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
export function promptRow(messages, isLater) {
  const texts = messages.map((message) => (message ? textOf(message.content) : ""));
  if (texts[0] === texts[1] && messages[0]?.role === messages[1]?.role)
    return aligned(
      messages.map((message) => messageBlock(message, textBlock(texts[0]), "identical", false)),
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

export function cellRows(cells) {
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

export function answerRow(calls) {
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
