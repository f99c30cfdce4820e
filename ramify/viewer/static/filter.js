// The one filter language of all lists (runs, calls, attempts, curves), and its input.
//
//   cost>0.1 stop:error model:qwen reward:0 -label:odd "two words"
//
// A list says which fields its rows have. All parts must hold; `group:FIELD` groups the rows of a
// list that has groups. A part that cannot be read is shown with its fix, and is left aside.

import { fill, h } from "./dom.js";

/**
 * What the rows of a list can be filtered by.
 * @typedef {object} Fields
 * @property {Record<string, (row: any) => number | null | undefined>} numbers can be compared
 * @property {Record<string, (row: any) => string>} texts lines of it are values of their own
 * @property {(row: any) => string} words where a part without a field is looked for
 * @property {string[]} [groups] the texts that rows are grouped by
 */

/** @typedef {{ start: number, end: number, words: string, fix: string }} Problem */

const COMPARE = {
  ">": (a, b) => a > b,
  "<": (a, b) => a < b,
  ">=": (a, b) => a >= b,
  "<=": (a, b) => a <= b,
  ":": (a, b) => a === b,
  "=": (a, b) => a === b,
};

export class FilterInput {
  // changed() is called after each edit.
  /** @param {Fields} fields */
  constructor(fields, { label, placeholder, changed, text = "", id = null }) {
    this.fields = fields;
    this.changed = changed;
    this.input = h("input", {
      type: "search",
      id,
      value: text,
      placeholder,
      "aria-label": label,
      oninput: () => this.set(this.input.value),
    });
    this.fix = h("p.filter-fix", { hidden: true, role: "status" });
    this.read();
  }

  get text() {
    return this.input.value;
  }

  set(text) {
    if (this.input.value !== text) this.input.value = text;
    this.read();
    this.changed();
  }

  clear() {
    this.input.value = "";
    this.read();
  }

  focus() {
    this.input.focus();
  }

  read() {
    const { matches, group, problem } = parseFilter(this.text, this.fields);
    this.matches = matches;
    this.group = group;
    this.fix.hidden = !problem;
    if (problem) this.showFix(problem);
  }

  /** @param {Problem} problem */
  showFix({ start, end, words, fix }) {
    const text = this.text,
      before = `${text.slice(0, start)}${start ? " " : ""}`,
      fixed = `${before}${fix} ${text.slice(end)}`.replace(/ +/g, " ").trim();
    fill(
      this.fix,
      h(
        "code",
        null,
        text.slice(0, start),
        h("u.wrong", null, text.slice(start, end)),
        text.slice(end),
      ),
      ` ${words}; `,
      h("button.small", { type: "button", onclick: () => this.set(fixed) }, `use ${fix}`),
    );
  }
}

/**
 * @param {string} text
 * @param {Fields} fields
 */
export function parseFilter(text, fields) {
  const tests = [];
  let group = null;
  /** @type {Problem | null} */
  let problem = null;
  for (const match of text.matchAll(/(-?)(?:([a-z_]+)(>=|<=|[:=<>]))?("[^"]*"?|\S+)/gi)) {
    const [part, not, name, sign, raw] = match,
      value = raw.replace(/^"|"$/g, "").toLowerCase(),
      field = name?.toLowerCase(),
      place = { start: match.index, end: match.index + part.length };
    if (field === "group" && fields.groups) {
      const of = own(fields.texts, value);
      if (of) group = { name: value, of };
      else problem ??= { ...place, ...groupProblem(fields.groups) };
      continue;
    }
    const test = field ? fieldTest(fields, field, sign, value) : wordTest(fields, value);
    if (typeof test === "function") tests.push(not ? (row) => !test(row) : test);
    else problem ??= { ...place, ...test };
  }
  problem ??= openPart(text, fields);
  return { matches: (row) => tests.every((test) => test(row)), problem, group };
}

function groupProblem(groups) {
  const words = `${groups.slice(0, -1).join(", ")} or ${groups.at(-1)}`;
  return { words: `rows are grouped by ${words}`, fix: `group:${groups[0]}` };
}

// A field whose value has not been typed yet.
/**
 * @param {string} text
 * @param {Fields} fields
 * @returns {Problem | null}
 */
function openPart(text, { numbers, groups }) {
  const open = /(?:^|\s)([a-z_]+)(>=|<=|[:=<>])(?=\s|$)/i.exec(text);
  if (!open) return null;
  const part = `${open[1]}${open[2]}`,
    value = own(numbers, open[1]) ? "0" : open[1] === "group" && groups ? groups[0] : "none";
  return {
    start: open.index,
    end: open.index + open[0].length,
    words: `${part} needs a value`,
    fix: `${part}${value}`,
  };
}

function wordTest({ words }, value) {
  return (row) => words(row).toLowerCase().includes(value);
}

// A test, or { words, fix } if the part cannot be read.
function fieldTest({ numbers, texts }, field, sign, value) {
  const numberOf = own(numbers, field),
    textOf = own(texts, field);
  if (numberOf) {
    const number = Number(value.replace(/^\$|,/g, ""));
    if (Number.isNaN(number) || !value)
      return {
        words: `${field} is compared with a number, not with ${value}`,
        fix: `${field}${sign}0.1`,
      };
    return (row) => typeof numberOf(row) === "number" && COMPARE[sign](numberOf(row), number);
  }
  if (!textOf) {
    const known = [...Object.keys(numbers), ...Object.keys(texts)];
    return {
      words: `there is no field ${field}: fields are ${known.join(", ")}`,
      fix: `${nearest(field, known)}${sign}${value}`,
    };
  }
  if (sign !== ":" && sign !== "=")
    return { words: `${field} is text: use ${field}:`, fix: `${field}:${value}` };
  const wordsOf = (row) => String(textOf(row) ?? "").toLowerCase();
  if (value === "none") return (row) => !wordsOf(row);
  if (sign === "=") return (row) => wordsOf(row).split("\n").includes(value);
  const named = value.replaceAll(" ", "_"); // "max turns" is stored as max_turns
  return (row) => wordsOf(row).includes(value) || wordsOf(row).includes(named);
}

// A field that is named like a method of every object is unknown.
function own(fields, name) {
  return Object.hasOwn(fields, name) ? fields[name] : null;
}

function nearest(word, known) {
  const distance = (a, b) => {
    let row = [...b, 0].map((_, index) => index);
    for (let i = 1; i <= a.length; i++) {
      const next = [i];
      for (let j = 1; j <= b.length; j++)
        next.push(
          Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + Number(a[i - 1] !== b[j - 1])),
        );
      row = next;
    }
    return row[b.length];
  };
  return known.map((each) => [distance(word, each), each]).sort((a, b) => a[0] - b[0])[0][1];
}
