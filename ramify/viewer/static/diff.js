// Word-by-word difference of two texts. The algorithm is jsdiff's; here are the words, a limit of
// time, and how a difference is drawn: words that differ are <del> on the left and <ins> on the
// right.

import { textBlock } from "./code.js";
import { h } from "./dom.js";
import { grouped, many } from "./format.js";
import { linkText } from "./provenance.js";
import Diff from "./vendor/diff.js";

const MAX_MS = 250; // then lines are compared instead of words
const MIN_EQUAL = 0.25; // share of two texts that must be equal for marks at single words to help
const KEPT_LINES = 3; // equal lines that are shown around a difference

class TokenDiff extends Diff {
  constructor(pattern) {
    super();
    this.pattern = pattern;
  }

  tokenize(text) {
    return text.match(this.pattern) || [];
  }
}

// A number is one word, also with a comma or a point in it.
const WORDS = new TokenDiff(
    /\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\p{L}\p{N}_])|\d+\.\d+(?![\p{L}\p{N}_])|[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu,
  ),
  LINES = new TokenDiff(/[^\n]*\n|[^\n]+$/g);

// [{ value, added, removed }, …]; texts that differ too much are one removed and one added part.
/** @returns {import("./vendor/diff.js").Part[]} */
export function differences(left, right) {
  if (left === right) return left ? [{ value: left }] : [];
  return (
    WORDS.diff(left, right, { timeout: MAX_MS }) ||
    LINES.diff(left, right, { timeout: MAX_MS }) || [
      { value: left, removed: true },
      { value: right, added: true },
    ]
  );
}

// The parts, or null if the texts have so little in common that every word would be marked.
function usefulParts(left, right) {
  const parts = differences(left, right),
    equal = parts.reduce(
      (sum, part) => sum + (part.added || part.removed ? 0 : part.value.trim().length),
      0,
    );
  return 2 * equal >= MIN_EQUAL * (left.length + right.length) ? parts : null;
}

// [left, right]: the texts as elements, with long equal stretches folded on both sides.
export function diffTexts(left, right, kind = "text") {
  const sides = [h("pre", { class: `said ${kind}` }), h("pre", { class: `said ${kind}` })],
    parts = usefulParts(left, right);
  if (!parts)
    return [left, right].map((text) =>
      text ? textBlock(text, { kind }) : h("p.none", null, "none"),
    );
  parts.forEach((part, index) => {
    if (part.removed) sides[0].append(h("del", null, part.value));
    else if (part.added) sides[1].append(h("ins", null, part.value));
    else equalParts(part.value, index > 0, index < parts.length - 1, sides);
  });
  return sides;
}

// One text with the words of the other: <del> is only in `left`, <ins> only in `right`.
export function differenceInOne(left, right) {
  const text = h("pre", { class: "said mixed", tabindex: "0", "aria-label": "difference" }),
    parts = usefulParts(left, right) || [
      { value: left && `${left}\n`, removed: true },
      { value: right, added: true },
    ];
  parts.forEach((part, index) => {
    if (part.removed) text.append(h("del", null, part.value));
    else if (part.added) text.append(h("ins", null, part.value));
    else equalParts(part.value, index > 0, index < parts.length - 1, [text]);
  });
  return text;
}

// Text that both have. Of many lines those next to a difference are shown, and a button shows the
// others.
function equalParts(text, isAfter, isBefore, sides) {
  const lines = text.split("\n"),
    kept = (isAfter ? KEPT_LINES : 0) + (isBefore ? KEPT_LINES : 0);
  if (lines.length <= kept + 2 || !(isAfter || isBefore)) {
    for (const side of sides) side.append(text);
    return;
  }
  const start = isAfter ? `${lines.slice(0, KEPT_LINES).join("\n")}\n` : "",
    end = isBefore ? `\n${lines.slice(-KEPT_LINES).join("\n")}` : "";
  const middle = text.slice(start.length, text.length - end.length),
    buttons = sides.map(() =>
      h(
        "button.unfold.equal",
        { type: "button" },
        `${grouped(lines.length - kept)} identical lines`,
      ),
    );
  const open = () => {
    for (const button of buttons) button.replaceWith(middle);
  };
  buttons.forEach((button, at) => {
    button.onclick = open;
    sides[at].append(start, button, end);
  });
}

// Marks the words that differ in two elements that already show the texts, such as coloured code.
export function markDifferences(left, right, [first, second]) {
  const ranges = [[], []],
    at = [0, 0];
  for (const { value, added, removed } of usefulParts(first, second) || []) {
    if (removed) ranges[0].push({ start: at[0], end: at[0] + value.length });
    if (added) ranges[1].push({ start: at[1], end: at[1] + value.length });
    if (!added) at[0] += value.length;
    if (!removed) at[1] += value.length;
  }
  linkText(left, ranges[0], (_, text) => h("del", null, text));
  linkText(right, ranges[1], (_, text) => h("ins", null, text));
}

// "12 words removed, 3 added"
export function sizeOfDifference(left, right) {
  const size = { removed: 0, added: 0 };
  for (const part of differences(left, right)) {
    const words = (part.value.match(/[\p{L}\p{N}_]+|[^\p{L}\p{N}_\s]/gu) || []).length;
    if (part.removed) size.removed += words;
    if (part.added) size.added += words;
  }
  return [
    size.removed ? `${many(size.removed, "word")} only on the left` : "",
    size.added ? `${many(size.added, "word")} only on the right` : "",
  ]
    .filter(Boolean)
    .join(", ");
}
