// The one filter language of all lists (runs, calls, attempts, curves), and its input.
//
//   cost>0.1 stop:error when:yesterday model:qwen reward:0 -label:odd "two words" sort:cost
//
// A list says which fields its rows have. All parts must hold. `group:FIELD` groups the rows of a
// list that has groups; `sort:FIELD` puts the largest or newest first, or sorts a text from A to Z,
// and `sort:-FIELD` does the opposite. If a part cannot be read, no row matches, and the reason is
// shown with a fix. `ramify runs` has the same language (store/run_filter.py).

import { fill, h } from "./dom.js";

/**
 * What the rows of a list can be filtered by.
 * @typedef {object} Fields
 * @property {Record<string, (row: any) => number | null | undefined>} numbers can be compared
 * @property {Record<string, (row: any) => string>} texts lines of it are values of their own
 * @property {Record<string, (row: any) => number | null | undefined>} [times] in Unix time
 * @property {(row: any) => string} words where a part without a field is looked for
 * @property {string[]} [groups] the texts that rows can only be grouped by
 */

/** @typedef {{ start: number, end: number, words: string, fix: string }} Problem */

/**
 * What a filter says.
 * @typedef {object} Parsed
 * @property {(row: any) => boolean} matches
 * @property {boolean} narrows whether it has a condition
 * @property {Problem | null} problem why it matches nothing
 * @property {{ name: string, of: (row: any) => string } | null} group
 * @property {{ name: string, down: boolean } | null} sort
 * @property {((a: any, b: any) => number) | null} order compares two rows, if `sort` is given
 */

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
    // as in Parsed; read() sets them
    this.matches = (_row) => true;
    this.narrows = false;
    this.group = this.sort = this.order = null;
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
    const { problem, ...parsed } = parseFilter(this.text, this.fields);
    this.problem = problem;
    Object.assign(this, parsed);
    this.fix.hidden = !problem;
    if (problem) this.showFix(problem);
  }

  // Replace the part `sort:…`; `down` is as in Parsed. An empty name removes it.
  setSort(name, down = true) {
    const rest = this.text.replace(/(^|\s)sort:\S*/gi, "").trim(),
      minus = down === firstDown(this.fields, name) ? "" : "-";
    this.set(`${rest} ${name ? `sort:${minus}${name}` : ""}`.trim());
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

// Whether `sort:NAME` begins with the largest: numbers and times do, texts begin with A.
/** @param {Fields} fields */
export function firstDown(fields, name) {
  return own(fields.texts, name) === null;
}

/**
 * @param {string} text
 * @param {Fields} fields
 * @param {Date} now
 * @returns {Parsed}
 */
export function parseFilter(text, fields, now = new Date()) {
  const tests = [];
  let group = null,
    sort = null;
  /** @type {Problem | null} */
  let problem = spacedPart(text, fields);
  for (const match of text.matchAll(/(-?)(?:([a-z_]+)(>=|<=|[:=<>]))?("[^"]*"?|\S+)/gi)) {
    const [part, not, name, sign, raw] = match,
      value = raw.replace(/^"|"$/g, "").toLowerCase(),
      field = name?.toLowerCase(),
      place = { start: match.index, end: match.index + part.length };
    if (field === "group" && fields.groups) {
      const of = fields.groups.includes(value) ? own(fields.texts, value) : null;
      if (of) group = { name: value, of };
      else problem ??= { ...place, ...groupProblem(fields.groups) };
      continue;
    }
    if (field === "sort") {
      const by = value.replace(/^-/, "");
      if (fieldOf(fields, by)) sort = { name: by, down: firstDown(fields, by) === (by === value) };
      else problem ??= { ...place, ...sortProblem(fields, by) };
      continue;
    }
    const test = field ? fieldTest(fields, field, sign, value, now) : wordTest(fields, value);
    if (typeof test === "function") tests.push(not ? (row) => !test(row) : test);
    else problem ??= { ...place, ...test };
  }
  problem ??= openPart(text, fields);
  return {
    matches: (row) => !problem && tests.every((test) => test(row)),
    narrows: tests.length > 0,
    problem,
    group,
    sort,
    order: sort ? orderBy(fields, sort) : null,
  };
}

// Compares two rows by a field; rows without a value come last.
function orderBy(fields, { name, down }) {
  const of = fieldOf(fields, name),
    isText = own(fields.texts, name) !== null,
    sign = down ? -1 : 1;
  const value = (row) => (isText ? String(of(row) ?? "").toLowerCase() || null : of(row));
  return (a, b) => {
    const [x, y] = [value(a), value(b)],
      lacks = Number(x === null || x === undefined) - Number(y === null || y === undefined);
    return lacks || (x < y ? -sign : x > y ? sign : 0);
  };
}

function fieldOf(fields, name) {
  return own(fields.numbers, name) || own(fields.times || {}, name) || own(fields.texts, name);
}

/** @param {Fields} fields */
function fieldNames({ numbers, times = {}, texts }) {
  return [...Object.keys(numbers), ...Object.keys(times), ...Object.keys(texts)];
}

function groupProblem(groups) {
  return {
    words: `rows can only be grouped by ${alternatives(groups)}`,
    fix: `group:${groups[0]}`,
  };
}

function sortProblem(fields, by) {
  const known = fieldNames(fields);
  return {
    words: `rows can only be sorted by ${alternatives(known)}`,
    fix: `sort:${nearest(by, known)}`,
  };
}

function alternatives(names) {
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} or ${names.at(-1)}` : names[0];
}

// A comparison that is written with spaces.
/** @returns {Problem | null} */
function spacedPart(text, fields) {
  const spaced = /(?<=^|[\s-])([a-z_]+)(\s*)(>=|<=|[<>=])(\s*)(\$?\d\S*)/gi;
  for (const { 0: part, 1: name, 2: before, 3: sign, 4: after, 5: value, index } of text.matchAll(
    spaced,
  ))
    if ((before || after) && fieldOf(fields, name.toLowerCase()))
      return {
        start: index,
        end: index + part.length,
        words: "a comparison must not contain spaces",
        fix: `${name}${sign}${value}`,
      };
  return null;
}

// A field whose value has not been typed yet.
/**
 * @param {string} text
 * @param {Fields} fields
 * @returns {Problem | null}
 */
function openPart(text, fields) {
  const open = /(?<=^|\s)-?([a-z_]+)(>=|<=|[:=<>])(?:""?)?(?=\s|$)/i.exec(text);
  if (!open) return null;
  const name = open[1].toLowerCase(),
    part = `${open[1]}${open[2]}`;
  const value =
    name === "sort"
      ? fieldNames(fields)[0]
      : name === "group" && fields.groups
        ? fields.groups[0]
        : own(fields.numbers, name)
          ? "0"
          : own(fields.times || {}, name)
            ? "today"
            : "none";
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
function fieldTest(fields, field, sign, value, now) {
  const { numbers, times = {}, texts } = fields;
  if (own(numbers, field)) return numberTest(own(numbers, field), field, sign, value);
  if (own(times, field)) return timeTest(own(times, field), field, sign, value, now);
  const textOf = own(texts, field);
  if (!textOf) {
    const known = fieldNames(fields);
    return {
      words: `unknown field ${field}: use one of ${known.join(", ")}, or put the text in quotes`,
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

function numberTest(numberOf, field, sign, value) {
  if (value === "none" && (sign === ":" || sign === "="))
    return (row) => typeof numberOf(row) !== "number";
  const number = Number(value.replace(/^\$|,/g, ""));
  if (Number.isNaN(number) || !value)
    return {
      words: `${field} needs a number, not ${value}`,
      fix: `${field}${sign}0.1`,
    };
  return (row) => typeof numberOf(row) === "number" && COMPARE[sign](numberOf(row), number);
}

function timeTest(timeOf, field, sign, value, now) {
  const span = timeSpan(value, now);
  if (!span)
    return {
      words: `${field} must be today, yesterday, an age such as 7d, 12h or 30m, or a date such as 2026-11-20, not ${value}`,
      fix: `${field}${sign}${sign === ":" || sign === "=" ? "today" : "7d"}`,
    };
  const [from, to] = span;
  const inside = {
    ":": (at) => at >= from && at < to,
    "=": (at) => at >= from && at < to,
    ">": (at) => at >= (to === Infinity ? from : to),
    ">=": (at) => at >= from,
    "<": (at) => at < from,
    "<=": (at) => at < (to === Infinity ? from : to),
  }[sign];
  return (row) => typeof timeOf(row) === "number" && inside(timeOf(row));
}

const AGES = { m: 60, h: 3600, d: 86400, w: 7 * 86400 };

// [first second, second after the last] of a day, month, year or minute in local time, or of the
// time since an age; null if it cannot be read.
/** @returns {[number, number] | null} */
export function timeSpan(value, now) {
  const days = { today: 0, yesterday: -1 }[value];
  if (days !== undefined)
    return calendarSpan(now.getFullYear(), now.getMonth(), now.getDate() + days, [0, 0, 1]);
  const age = /^(\d+(?:\.\d+)?)([mhdw])$/.exec(value);
  if (age) return [now.getTime() / 1000 - Number(age[1]) * AGES[age[2]], Infinity];
  const date = /^(\d{4})(?:-(\d\d)(?:-(\d\d)(?:t(\d\d):(\d\d))?)?)?$/.exec(value);
  if (!date) return null;
  const [year, month, day, hour, minute] = date.slice(1).map((part) => Number(part ?? Number.NaN));
  if (month < 1 || month > 12 || day < 1 || day > new Date(year, month, 0).getDate()) return null;
  if (hour > 23 || minute > 59) return null;
  if (!Number.isNaN(hour)) {
    const from = new Date(year, month - 1, day, hour, minute).getTime() / 1000;
    return [from, from + 60];
  }
  if (!Number.isNaN(day)) return calendarSpan(year, month - 1, day, [0, 0, 1]);
  return Number.isNaN(month)
    ? calendarSpan(year, 0, 1, [1, 0, 0])
    : calendarSpan(year, month - 1, 1, [0, 1, 0]);
}

// A date and the date so many [years, months, days] later, as Unix times.
/** @returns {[number, number]} */
function calendarSpan(year, month, day, [years, months, days]) {
  return [
    new Date(year, month, day).getTime() / 1000,
    new Date(year + years, month + months, day + days).getTime() / 1000,
  ];
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
