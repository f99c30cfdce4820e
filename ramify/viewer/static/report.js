// A run as a report to read or print: its answer, the table of its calls, then each session on a
// page (separate when printed).

import { get, load, offline, optional } from "./api.js";
import { codeBlock, proseBlock, textBlock } from "./code.js";
import { fill, h } from "./dom.js";
import {
  dollars,
  grouped,
  hasMarkup,
  many,
  oneLine,
  runAddress,
  seconds,
  stopWords,
} from "./format.js";
import { Run } from "./run.js";
import { sharedRun } from "./shared_run.js";
import { Story } from "./story.js";
import { table } from "./table.js";
import { textOf } from "./turn.js";

const MAX_ROWS = 1000; // calls in the table
const MAX_SESSIONS = 60; // sessions that are told turn by turn

async function reportPage(page, [key]) {
  const run = new Run(await get("/api/run", { key })),
    story = new Story(run, (call) => `${runAddress(key)}/call/${encodeURIComponent(call)}`);
  const sessions = run.calls.filter((call) => call.kind === "rlm" || call.parent < 0),
    sheets = h("div");
  fill(
    story.tools,
    h("button.small", { type: "button", onclick: () => print() }, "print"),
    h("a.small", { href: runAddress(key) }, offline ? "run" : "back to the run"),
  );
  fill(page, h("div.report", null, story.element, callTable(run), sheets));
  story.draw();
  for (const call of sessions.slice(0, MAX_SESSIONS)) {
    try {
      sheets.append(await session(await get("/api/call", { key, id: call.id })));
    } catch (error) {
      sheets.append(h("p.problem", null, error.message));
    }
  }
  if (sessions.length > MAX_SESSIONS)
    sheets.append(
      h(
        "p.note",
        null,
        `${grouped(sessions.length - MAX_SESSIONS)} more sessions are on the run's page`,
      ),
    );
  page.firstChild.dataset.ready = "yes";
  return { shared: () => sharedRun(run, key) };
}

// question → answer → cost → time of every call
function callTable(run) {
  const stopOf = (call) => stopWords(call.stop, run.alive);
  const cameOf = (call) =>
    call.failed ? call.error || call.reason || stopOf(call)[0] : call.answer;
  /** @type {import("./table.js").Column[]} */
  const columns = [
    { name: "call", cell: (call) => call.id },
    {
      name: "question",
      cell: (call) => oneLine(call.question, 160),
      style: (call) => ({ "padding-left": `${6 + 12 * Math.min(call.depth, 6)}px` }),
    },
    {
      name: "answer",
      cell: (call) => oneLine(cameOf(call) || "", 160),
      tone: (call) => (call.failed ? "bad" : ""),
    },
    {
      name: h("span.offscreen", null, "mark"),
      cell: (call) => call.outlier || (call.stop === "final" ? "" : stopOf(call)[0]),
      tone: (call) => (call.outlier ? "odd" : call.stop === "final" ? "" : stopOf(call)[1]),
    },
    {
      name: "cost",
      cell: (call) => (call.cost === null ? "" : dollars(call.cost)),
      tone: () => "right",
    },
    {
      name: "time",
      cell: (call) => seconds(Math.max(0, (call.ended_s ?? run.now()) - call.started_s)),
      tone: () => "right",
    },
  ];
  const more = run.calls.length - MAX_ROWS;
  return h(
    "section.sheet",
    null,
    h("h2", null, many(run.calls.length, "call")),
    h(
      "div.md-table",
      { tabindex: "0", role: "region", "aria-label": "calls" },
      table("table", columns, run.calls.slice(0, MAX_ROWS)),
    ),
    more > 0 ? h("p.note", null, `and ${grouped(more)} more`) : null,
  );
}

async function session(call) {
  const answer = textOf(call.answer),
    sheet = h(
      "section.sheet",
      null,
      h("h2", null, `call ${call.id}: ${oneLine(textOf(call.question), 200)}`),
      h(
        "p.quiet",
        null,
        [
          call.model,
          many(call.num_turns, "turn"),
          dollars(call.cost),
          stopWords(call.stop)[0],
        ].join(" · "),
      ),
      call.turns.map(turnOf),
    );
  if (call.has_answer)
    sheet.append(
      h(
        "section.answer",
        null,
        h("h3", null, "answer"),
        hasMarkup(answer)
          ? h("div.said.answer-text.formatted", null, (await load("markdown"))(answer))
          : textBlock(answer, { kind: "answer-text", lines: 1e9 }),
      ),
    );
  else
    sheet.append(h("p.note", null, `no answer: ${textOf(call.error) || stopWords(call.stop)[0]}`));
  return sheet;
}

function turnOf(turn) {
  const told = turn.index ? [] : turn.prompt.filter((message) => message.role !== "system"),
    every = { lines: 1e9 };
  return h(
    "section.report-turn",
    null,
    h(
      "h3",
      null,
      `turn ${turn.index + 1}`,
      h(
        "span.quiet",
        null,
        ` ${seconds(turn.seconds)}${turn.cost ? ` · ${dollars(turn.cost)}` : ""}`,
      ),
    ),
    told.map((message) => textBlock(message.content, every)),
    turn.cells.length ? null : proseBlock(textOf(turn.reply.content), { ...every, kind: "reply" }),
    turn.cells.map((cell) => [
      codeBlock(textOf(cell.code), { error: textOf(cell.error) }),
      [cell.stdout, cell.value]
        .filter(textOf)
        .map((text) => textBlock(text, { ...every, kind: "output" })),
      textOf(cell.error) ? textBlock(cell.error, { ...every, kind: "error" }) : null,
    ]),
  );
}

optional.report = reportPage;
