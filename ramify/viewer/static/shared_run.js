// What of a run leaves its page (share.js): question, answer, the reason of its end, its figures, and
// a table of its calls.

import { offline } from "./api.js";
import {
  count,
  dollars,
  grouped,
  many,
  number,
  oneLine,
  runAddress,
  seconds,
  stopWords,
} from "./format.js";
import { scoresOf } from "./story.js";

const MAX_CALLS = 5000; // in the table

// canvas: the picture of the tree, if the page has one
/** @returns {import("./share.js").Shared} */
export function sharedRun(run, key, canvas = null) {
  const { head, calls } = run,
    scores = Object.entries(scoresOf(head)).map(([name, value]) => `${name} ${number(value)}`),
    differing = calls.filter((call) => call.outlier),
    more = calls.length - MAX_CALLS;
  const facts = [
    [...scores, head.gold ? `expected ${head.gold}` : ""].filter(Boolean).join(" · "),
    head.ending ? `ended: ${head.ending}` : stopWords(head.stop, head.alive)[0],
    [
      many(head.num_calls, "call"),
      `${count(head.usage.input_tokens + head.usage.output_tokens)} tokens`,
      dollars(head.cost),
      seconds(head.seconds),
      head.id,
    ].join(" · "),
    ...differing.slice(0, 10).map((call) => `call ${call.id}: ${call.outlier}`),
  ];
  const download = `/api/journal?key=${encodeURIComponent(key)}`;
  return {
    name: head.id || "run",
    title: oneLine(head.question, 300) || head.id,
    parts: [
      head.has_answer ? { code: head.answer || "(an empty answer)" } : { text: "no answer" },
      { text: facts.filter(Boolean).join("\n") },
      ...(canvas?.width ? [{ canvas }] : []),
      { heading: many(calls.length, "call") },
      {
        table: {
          head: ["call", "question", "answer", "ended", "tokens", "cost", "time"],
          rows: calls.slice(0, MAX_CALLS).map((call) => rowOfCall(run, call)),
        },
      },
      ...(more > 0 ? [{ text: `and ${grouped(more)} more` }] : []),
    ],
    file: `/api/export?key=${encodeURIComponent(key)}`,
    links: [
      ["report", "one session per page, to read or print", `${runAddress(key)}/report`],
      ...(offline
        ? []
        : [/** @type {[string, string, string]} */ (["journal", "as it was recorded", download])]),
    ],
  };
}

function rowOfCall(run, call) {
  const [ended] = stopWords(call.stop, run.alive);
  return [
    call.id,
    oneLine(call.question, 160),
    oneLine((call.failed ? call.error || call.reason : call.answer) || "", 160),
    ended,
    grouped(call.tokens_in + call.tokens_out),
    call.cost === null ? "" : dollars(call.cost),
    seconds(Math.max(0, (call.ended_s ?? run.now()) - call.started_s)),
  ];
}
