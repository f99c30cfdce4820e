// Where two calls differ first: the turn, the cell, the texts, and the numbers in them. Knows nothing
// of the page.
//
//   another prompt ── another reply ── another output of the same code ── only one goes on

import { differences } from "./diff.js";
import { number } from "./format.js";
import { textOf } from "./turn.js";

/**
 * @typedef {object} Difference
 * @property {"told" | "reply" | "output" | "ends"} what
 * @property {number} turn index of the turn
 * @property {number} at index of the message in its prompt, or of the cell; -1 for neither
 * @property {[string, string]} texts the two that differ
 */

/** @type {Record<Difference["what"], string>} */
const REASONS = {
  told: "their prompts differ",
  reply: "the model replies differently",
  output: "the same code gives a different result",
  ends: "only one of them continues",
};

// [index, why] of the first turn at which two calls differ, or null.
/** @returns {[number, string] | null} */
export function parting(calls) {
  const found = firstDifference(calls);
  return found && [found.turn, REASONS[found.what]];
}

export function reasonOf({ what }) {
  return REASONS[what];
}

/** @returns {Difference | null} */
export function firstDifference([left, right]) {
  const most = Math.max(left.turns.length, right.turns.length);
  for (let turn = 0; turn < most; turn++) {
    const found = differenceOfTurns(left.turns[turn], right.turns[turn]);
    if (found) return { ...found, turn };
  }
  return null;
}

// Prompts are compared before replies, and replies before what their code gives.
/** @returns {Omit<Difference, "turn"> | null} */
function differenceOfTurns(left, right) {
  if (!left || !right) return { what: "ends", at: -1, texts: ["", ""] };
  const prompts = firstUnlike(left.prompt, right.prompt, ({ role, content }) => [
    textOf(content),
    role,
  ]);
  if (prompts) return { what: "told", ...prompts };
  const replies = [left, right].map((turn) => [
    textOf(turn.reply.content),
    JSON.stringify(turn.reply.tool_calls),
  ]);
  if (replies[0].join() !== replies[1].join()) {
    const code = firstUnlike(left.cells, right.cells, (cell) => [textOf(cell.code)]);
    return {
      what: "reply",
      at: code?.at ?? -1,
      texts: code?.texts ?? [replies[0][0], replies[1][0]],
    };
  }
  const given = firstUnlike(left.cells, right.cells, (cell) =>
    ["code", "stdout", "value", "error"].map((name) => textOf(cell[name])),
  );
  return given && { what: "output", ...given };
}

// The first of two lists' entries that differ, with the first of their texts that does.
/** @returns {{ at: number, texts: [string, string] } | null} */
function firstUnlike(left, right, textsOf) {
  for (let at = 0; at < Math.max(left.length, right.length); at++) {
    const [first, second] = [left[at], right[at]].map((each) => (each ? textsOf(each) : [])),
      name = [...first, ...second].findIndex((_, index) => first[index] !== second[index]);
    if (name >= 0) return { at, texts: [first[name] ?? "", second[name] ?? ""] };
  }
  return null;
}

const NUMBER = /-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?/g;
const MAX_NUMBERS = 3; // pairs that are named

// The numbers of two texts that differ, in pairs: those between the same words. Empty if the words
// differ, too.
/** @returns {[string, string][]} */
export function numbersApart(left, right) {
  const words = [left, right].map((text) => text.replace(NUMBER, "0"));
  if (words[0] === words[1]) {
    const [first, second] = [left, right].map((text) => text.match(NUMBER) || []);
    return pairsOf(first, second);
  }
  // Other words differ, too: the first numbers that stand for each other.
  const parts = differences(left, right);
  for (const [index, part] of parts.entries()) {
    const next = parts[index + 1];
    if (!part.removed || !next?.added) continue;
    const [first, second] = [part.value, next.value].map((text) => text.match(NUMBER) || []);
    if (first.length === 1 && second.length === 1 && isWhole(part.value) && isWhole(next.value))
      return pairsOf(first, second);
  }
  return [];
}

function isWhole(text) {
  return text.trim().replace(NUMBER, "") === "";
}

/** @returns {[string, string][]} */
function pairsOf(first, second) {
  return first
    .map((each, at) => /** @type {[string, string]} */ ([each, second[at]]))
    .filter(([one, other]) => one !== other)
    .slice(0, MAX_NUMBERS);
}

// "29,750 more (22 times as much)": the second number against the first.
export function apart([first, second]) {
  const [from, to] = [first, second].map((text) => Number(text.replaceAll(",", ""))),
    by = to - from,
    ratio = from > 0 && to > 0 ? to / from : 0,
    percent = Number(Math.abs(100 * (ratio - 1)).toPrecision(2));
  const times =
    ratio >= 2
      ? ` (${number(Number(ratio.toPrecision(2)))} times as much)`
      : ratio
        ? ` (${by > 0 ? "+" : "−"}${percent} %)`
        : "";
  return `${number(Math.abs(by))} ${by > 0 ? "more" : "less"}${times}`;
}
