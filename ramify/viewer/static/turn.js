// One turn of a transcript as elements: prompt, reply, code with output and errors, tool answers,
// sub-calls and scores. `view` is the Transcript that shows it.

import { offline } from "./api.js";
import { codeBlock, errorLine, proseBlock, textBlock } from "./code.js";
import { h } from "./dom.js";
import { count, dollars, grouped, many, number, oneLine, seconds } from "./format.js";
import { showRequest } from "./request.js";
import { fillSubcalls } from "./subcalls.js";
import { tokenStrip } from "./tokens.js";

export function turnElement(view, turn, part) {
  const plain = view.call.kind !== "rlm" && view.call.num_turns <= 1;
  const facts = [
    turn.asked_s === null ? null : `at ${seconds(turn.asked_s)}`,
    `reply in ${seconds(turn.seconds)}`,
    `${count(turn.usage.input_tokens)} in, ${count(turn.usage.output_tokens)} out`,
    turn.cost ? dollars(turn.cost) : null,
    turn.finish !== "stop" ? turn.finish : null,
  ].filter(Boolean);
  const strip = h("div.strip-holder"),
    request = h("div.strip-holder"),
    again = h("div.strip-holder");
  return h(
    "section.turn",
    { id: `turn-${turn.index}`, "data-turn": String(turn.index), tabindex: "-1" },
    h(
      "header.turn-head",
      null,
      h(
        "a.turn-no",
        { href: view.actions.address(view.call.id, turn.index), title: "link to this turn" },
        plain ? "request" : `turn ${turn.index + 1}`,
      ),
      h("span.turn-facts", null, facts.join(" · ")),
      turn.num_sampled
        ? h(
            "button.small",
            {
              type: "button",
              onclick: () => tokenStrip(strip, view.run.head.key, view.call.id, turn.index),
            },
            `${count(turn.num_sampled)} tokens`,
          )
        : null,
      h(
        "button.small.request",
        {
          type: "button",
          onclick: () => showRequest(request, view.run.head.key, view.call.id, turn.index),
        },
        "request",
      ),
      offline || !view.run.head.is_journal
        ? null
        : h(
            "button.small.request",
            {
              type: "button",
              onclick: async () =>
                (await import("./again.js")).showAgain(
                  again,
                  view.run.head.key,
                  view.call.id,
                  turn.index,
                ),
            },
            "run again",
          ),
    ),
    request,
    again,
    view.call.notes.filter((note) => note.turn === turn.index).map(noteLine),
    kept(view, turn),
    told(view, turn),
    said(view, turn, part),
    marksOf(turn.marks),
    strip,
  );
}

// Earlier messages at the start of this prompt: collapsed, because they are shown above.
function kept(view, turn) {
  if (!turn.reused) return null;
  const before = turn.index ? view.call.turns[turn.index - 1] : null;
  const all = before ? before.reused + before.prompt.length + 1 : turn.reused;
  const words =
    turn.reused < all
      ? `history was compacted: ${turn.reused} of ${many(all, "message")} kept`
      : `${many(turn.reused, "earlier message")} kept`;
  const details = h(
    "details.kept",
    { class: turn.reused < all ? "warned" : "" },
    h("summary", null, words),
  );
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1)
      details.append(
        h("ol", null, messagesBefore(view, turn).slice(0, turn.reused).map(messageLine)),
      );
  });
  return details;
}

function messagesBefore(view, turn) {
  let messages = [];
  for (const each of view.call.turns.slice(0, turn.index)) {
    while (messages.length < each.reused)
      messages.push({
        role: "…",
        content: view.call.fork ? `in call ${view.call.fork.call}` : "in an earlier call",
      });
    messages = [...messages.slice(0, each.reused), ...each.prompt, each.reply];
  }
  while (messages.length < turn.reused)
    messages.push({
      role: "…",
      content: view.call.fork ? `in call ${view.call.fork.call}` : "in an earlier call",
    });
  return messages;
}

export function told(view, turn) {
  const before = turn.index ? view.call.turns[turn.index - 1] : null;
  return turn.prompt.map((message, index) => {
    const size =
      typeof message.content === "string" ? message.content.length : message.content.chars;
    const whole = view.full((it) => it.turns[turn.index].prompt[index].content);
    // it repeats the output of the cells
    const seen = before?.cells.length && message.role !== "system";
    const open = message.role !== "system" && !seen;
    const words = seen ? "observation" : message.role;
    return h(
      "details.message",
      { class: `r-${message.role}`, open },
      h(
        "summary",
        null,
        h("b", null, words),
        h(
          "span.quiet",
          null,
          ` ${many(size, "character")}${seen ? `: ${oneLine(textOf(message.content), 90)}` : ""}`,
        ),
      ),
      pictures(view, message),
      textBlock(message.content, { whole }),
    );
  });
}

// The pictures that a message shows to the model. A file of one run holds only their names.
function pictures(view, message) {
  const figures = (message.pictures || []).map((picture) => {
    const words = h("figcaption", null, [picture.name, picture.about].filter(Boolean).join(": "));
    if (offline) return h("figure.sent-picture", null, words);
    const from = { key: view.run.head.key, id: view.call.id, digest: picture.digest };
    const address = `/api/picture?${new URLSearchParams(from)}`;
    const { width, height } = picture;
    const alt = picture.name || "a picture that the session made";
    const image = h("img", { src: address, alt, width, height, loading: "lazy" });
    return h(
      "figure.sent-picture",
      null,
      h("a", { href: address, target: "_blank" }, image),
      words,
    );
  });
  return figures.length ? h("div.pictures", null, figures) : null;
}

function said(view, turn, part) {
  const reply = turn.reply,
    parts = [],
    cells = turn.cells.map((cell, index) => ({ cell, index, used: false }));
  if (textOf(reply.reasoning)) {
    parts.push(
      h(
        "details.message.reasoning",
        null,
        h(
          "summary",
          null,
          h("b", null, "reasoning"),
          h("span.quiet", null, ` ${oneLine(textOf(reply.reasoning), 90)}`),
        ),
        textBlock(reply.reasoning, {
          lines: 40,
          whole: view.full((it) => it.turns[turn.index].reply.reasoning),
        }),
      ),
    );
  }
  const place = (wanted) => {
    const found = cells.find(
      (each) => !each.used && textOf(each.cell.code).trim() === wanted.trim(),
    );
    if (found) found.used = true;
    return found ? cellElement(view, turn, found.cell, found.index, part) : null;
  };
  // if replies consist only of code
  const raw = turn.cells.length ? place(textOf(reply.content)) : null;
  if (raw) parts.push(raw);
  else if (typeof reply.content !== "string")
    parts.push(
      textBlock(reply.content, {
        kind: "reply",
        lines: 40,
        whole: view.full((it) => it.turns[turn.index].reply.content),
      }),
    );
  else {
    for (const piece of pieces(reply.content)) {
      const { text, code, language } = piece;
      if (code === undefined) parts.push(proseBlock(text, { kind: "reply", lines: 60 }));
      else parts.push(place(code) || codeBlock(code, { label: language || "text", language }));
    }
  }
  for (const tool of reply.tool_calls)
    parts.push(
      h(
        "p.tool-call",
        null,
        h("b", null, `${tool.name}(`),
        oneLine(textOf(tool.arguments), 400),
        h("b", null, ")"),
      ),
    );
  for (const each of cells)
    if (!each.used) parts.push(cellElement(view, turn, each.cell, each.index, part));
  // of a cell that is still running
  const early = turn.tools.filter((tool) => tool.cell >= turn.cells.length);
  if (early.length)
    parts.push(
      h(
        "div.cell.early",
        null,
        early.map((tool) => toolAnswer(view, turn, tool)),
      ),
    );
  return parts;
}

function cellElement(view, turn, cell, index, part) {
  const error = textOf(cell.error),
    code = textOf(cell.code),
    whole = (name) => view.full((it) => it.turns[turn.index].cells[index][name]);
  const place = h("div.subcalls");
  part.places.set(index, place);
  fillSubcalls(view, place, turn.index, index);
  const cut = cell.stdout_chars > cell.shown_chars;
  const facts = [turn.cells.length > 1 ? `cell ${index + 1}` : "", `ran ${seconds(cell.seconds)}`]
    .filter(Boolean)
    .join(" · ");
  return h(
    "div.cell",
    { class: error ? "broken" : "", "data-cell": String(index) },
    codeBlock(code, { error, died: cell.died }),
    turn.tools.filter((tool) => tool.cell === index).map((tool) => toolAnswer(view, turn, tool)),
    place,
    textOf(cell.stdout)
      ? h(
          "div.out",
          { "data-part": "stdout" },
          h("span.label", null, "output"),
          textBlock(cell.stdout, { kind: "output", whole: whole("stdout") }),
        )
      : null,
    cut
      ? h(
          "p.note",
          null,
          `${grouped(cell.stdout_chars)} characters were printed; the model saw ${grouped(cell.shown_chars)} of them`,
        )
      : null,
    cell.has_value
      ? h(
          "div.out",
          { "data-part": "value" },
          h("span.label", null, "value"),
          textBlock(cell.value, { kind: "output", whole: whole("value") }),
        )
      : null,
    error
      ? h(
          "details.trace",
          { open: !errorLine(error) },
          h("summary", null, cell.died ? "the session died" : "traceback"),
          textBlock(cell.error, { kind: "error", whole: whole("error") }),
        )
      : null,
    cell.restored.length
      ? h("p.note", null, `reserved names were restored: ${cell.restored.join(", ")}`)
      : null,
    h("div.cell-facts", null, facts),
  );
}

// What a tool of the user's gave to a cell.
function toolAnswer(view, turn, tool) {
  const failed = Boolean(textOf(tool.error)),
    value = failed ? tool.error : tool.result;
  const whole = view.full(
    (it) =>
      it.turns[turn.index].tools.find(
        (each) => each.cell === tool.cell && each.ordinal === tool.ordinal,
      )[failed ? "error" : "result"],
  );
  return h(
    "details.tool-answer",
    { class: failed ? "bad" : "", "data-tool": tool.name },
    h(
      "summary",
      null,
      h("b", null, `${tool.name}(…)`),
      h("span.came", null, oneLine(textOf(value), 160) || "nothing"),
      h("span.took", null, `at ${seconds(tool.at_s)}`),
    ),
    textBlock(value, { kind: failed ? "error" : "output", whole }),
  );
}

// What somebody scored, beside what it is about: numbers by name, and a text.
export function marksOf(marks) {
  if (!marks.length) return null;
  return h(
    "dl.marks",
    { "aria-label": "scores" },
    marks.map((mark) =>
      h(
        "div",
        { class: sign(mark) },
        h("dt", null, mark.by),
        h(
          "dd",
          null,
          Object.entries(mark.values).map(([name, value]) =>
            h(
              "span.score",
              { class: value > 0 ? "good" : "bad" },
              name === mark.by ? number(value) : `${name} ${number(value)}`,
            ),
          ),
          mark.tokens.length ? h("span.quiet", null, `per token: ${mark.tokens.join(", ")}`) : null,
          mark.text ? h("span.hint", null, mark.text) : null,
        ),
      ),
    ),
  );
}

function sign(mark) {
  const values = Object.values(mark.values);
  return values.length ? (values[0] > 0 ? "good" : "bad") : "";
}

export function textOf(value) {
  return typeof value === "string" ? value : value ? value.text : "";
}

export function noteLine(note) {
  return h(
    "p.note",
    { class: note.kind === "attempt" ? "warned" : "" },
    h("span.quiet", null, `${seconds(note.at_s)} `),
    note.kind === "attempt" ? `an attempt failed: ${note.text}` : note.text,
  );
}

function messageLine(message) {
  return h("li", null, h("b", null, message.role), ` ${oneLine(textOf(message.content), 220)}`);
}

// A reply as prose and fenced code, in order.
export function pieces(content) {
  const found = [],
    fence =
      /^[ \t]*(```+|~~~+)[ \t]*([\w.+-]*)[^\n`]*\n([\s\S]*?)(?:^[ \t]*\1[ \t]*$|(?![\s\S]))/gm;
  let at = 0;
  for (const match of content.matchAll(fence)) {
    if (content.slice(at, match.index).trim())
      found.push({ text: content.slice(at, match.index).trim() });
    found.push({ code: match[3].replace(/\n$/, ""), language: match[2] });
    at = match.index + match[0].length;
  }
  if (content.slice(at).trim()) found.push({ text: content.slice(at).trim() });
  return found;
}
