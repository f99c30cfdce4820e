// The sub-calls of a cell: every session, and the first few and the failed ones of many plain
// calls.

import { fill, h } from "./dom.js";
import { grouped, many, oneLine, seconds, stopWords } from "./format.js";
import { tallyOf } from "./outline.js";

const FEW = 4; // maximum plain sub-calls of a cell that are listed one by one

export function fillSubcalls(view, place, turn, cell) {
  const indices = view.run.made(view.row, turn, cell);
  if (!indices.length) return;
  const calls = indices.map((index) => [index, view.run.calls[index]]);
  const plain = calls.filter(([, call]) => call.kind !== "rlm"),
    deep = calls.filter(([, call]) => call.kind === "rlm");
  const failed = plain.filter(([, call]) => call.failed),
    odd = plain.filter(([, call]) => call.outlier && !call.failed);
  const shown =
    plain.length <= FEW + 2
      ? plain
      : [...new Set([...plain.slice(0, FEW - 1), ...failed.slice(0, 2), ...odd.slice(0, 2)])];
  const rows = [...shown, ...deep.slice(0, 40)].map(([, call]) => subcall(view, call));
  if (shown.length < plain.length || deep.length > 40) {
    const tally = tallyOf(calls.map(([, call]) => call));
    const words = [
      `${many(calls.length, "sub-call")}: ${grouped(tally.done)} done`,
      tally.failed ? `${tally.failed} failed` : "",
      tally.odd ? `${tally.odd} differ` : "",
    ]
      .filter(Boolean)
      .join(", ");
    rows.push(
      h(
        "button.sub.all",
        {
          type: "button",
          onclick: () => view.actions.showOnly(indices, `sub-calls of turn ${turn + 1}`),
        },
        `${words} — list them all`,
      ),
    );
  }
  fill(place, rows);
}

function subcall(view, call) {
  const [words, tone] = stopWords(call.stop, view.run.alive);
  const came = call.failed
    ? call.error || call.reason
    : call.stop
      ? call.answer
      : call.state === "asking"
        ? "asking …"
        : "…";
  return h(
    "a.sub",
    { href: view.actions.address(call.id, null), "data-call": call.id },
    h("i", { class: `dot k-${call.kind}` }),
    h("span.id", null, call.id),
    h("span.asked", null, oneLine(call.question, 160)),
    h(
      "span.came",
      { class: call.failed ? "bad" : call.outlier ? "odd" : "", title: call.outlier || null },
      oneLine(came || words, 160),
    ),
    call.outlier && !call.failed ? h("span.mark.odd", null, "differs") : null,
    h("span.took", null, call.ended_s === null ? words : seconds(call.ended_s - call.started_s)),
    call.stop && call.stop !== "final" && call.stop !== "error"
      ? h("span", { class: `mark ${tone}` }, words)
      : null,
  );
}
