// Code with line numbers, syntax colors and a mark at the line of an error. The highlighter's tree
// is converted to elements; its HTML is not used.

import { load, optional } from "./api.js";
import { copy, fill, h } from "./dom.js";
import { grouped, hasMarkup } from "./format.js";
import hljs from "./vendor/highlight.js";
import python from "./vendor/highlight-python.js";

hljs.registerLanguage("python", python);
const MAX_COLOURED = 60000; // characters; more stays plain
const OUTPUT_LINES = 14;

// What a fence calls a language -> its grammar. Those other than Python are in languages.js.
const GRAMMARS = {
  __proto__: null,
  ...named("python", "python", "py", "python3", "repl", "ipython"),
  ...named("json", "json", "jsonc", "json5", "jsonl"),
  ...named("bash", "bash", "sh", "shell", "zsh", "console"),
  ...named("javascript", "javascript", "js", "jsx", "ts", "tsx", "typescript"),
  ...named("sql", "sql", "sqlite", "postgresql", "duckdb"),
  ...named("xml", "xml", "html", "svg"),
};

function named(grammar, ...names) {
  return Object.fromEntries(names.map((name) => [name, grammar]));
}

export function registerGrammars(grammars) {
  for (const [name, grammar] of Object.entries(grammars)) hljs.registerLanguage(name, grammar);
}

// [[{ text, scope }, …] of each line]; without a grammar all of it is plain
function colouredLines(code, grammar) {
  const lines = [[]];
  const add = (text, scope) => {
    text.split("\n").forEach((part, index) => {
      if (index) lines.push([]);
      if (part) lines[lines.length - 1].push({ text: part, scope });
    });
  };
  const walk = (node, scope) => {
    if (typeof node === "string") add(node, scope);
    else for (const child of node.children) walk(child, node.scope || scope);
  };
  if (code.length > MAX_COLOURED || !hljs.getLanguage(grammar)) add(code, "");
  else
    walk(hljs.highlight(code, { language: grammar, ignoreIllegals: true })._emitter.rootNode, "");
  return lines;
}

function colouredLine(parts) {
  return parts.map(({ text, scope }) => h("span", { class: scopeClass(scope) }, text));
}

// An element with code in the colors of `language`, as a fence calls it. draw(lines) makes its
// content from the parts of each line; it is called again if the grammar comes later.
function colouredCode(code, language, draw) {
  const grammar = GRAMMARS[language.toLowerCase()] || "",
    element = h("code", { dir: "ltr" }, draw(colouredLines(code, grammar)));
  if (grammar && !hljs.getLanguage(grammar) && !optional.languages)
    load("languages").then(() => fill(element, draw(colouredLines(code, grammar))));
  return element;
}

// A block of code inside a text.
export function fencedCode(code, language) {
  const draw = (lines) => lines.map((parts, at) => [at ? "\n" : "", colouredLine(parts)]);
  return h("pre", { tabindex: "0" }, colouredCode(code, language, draw));
}

function scopeClass(scope) {
  return scope ? `c-${scope.split(".")[0].replace(/[^a-z_-]/gi, "")}` : "";
}

// The last line of the cell that a traceback names; 0 for none.
export function errorLine(error) {
  const frames = [...error.matchAll(/File "<cell (\d+)>", line (\d+)/g)];
  const own = frames.filter((frame) => frame[1] === frames[0][1]);
  return own.length ? Number(own[own.length - 1][2]) : 0;
}

function lastLine(error) {
  const lines = error.trim().split("\n");
  return lines[lines.length - 1];
}

export function codeBlock(
  code,
  { error = "", died = false, label = "code", language = "python" } = {},
) {
  const text = code.replace(/\n+$/, "");
  const marked = error ? errorLine(error) : 0;
  const rowOf = (parts, index) => {
    const row = h("span.line", { "data-n": String(index + 1) }, colouredLine(parts), "\n");
    if (index + 1 !== marked) return row;
    row.classList.add("wrong");
    return [
      row,
      h(
        "span.fault",
        { role: "note" },
        `${died ? lastLine(error.split("\n")[0]) : lastLine(error)}\n`,
      ),
    ];
  };
  return h(
    "div.code",
    null,
    h(
      "button.copy",
      {
        type: "button",
        onclick: () => copy(text, label),
        "aria-label": `copy ${label}`,
        title: "copy",
      },
      "copy",
    ),
    h(
      "pre",
      { tabindex: "0", "aria-label": label },
      colouredCode(text, language, (lines) => lines.map(rowOf)),
    ),
  );
}

// A text that the server may have cut ({ text, chars }), collapsed if it is long. `whole` fetches
// the full text. Each line runs in the direction of its first letter.
export function textBlock(
  value,
  { kind = "text", lines = OUTPUT_LINES, whole = null, label = "text" } = {},
) {
  const text = typeof value === "string" ? value : value.text;
  const chars = typeof value === "string" ? 0 : value.chars;
  const all = text.replace(/\n+$/, "").split("\n");
  const long = all.length > lines || text.length > 160 * lines;
  const pre = h(
    kind === "answer-text" || kind === "reply" ? "div" : "pre",
    { class: `said ${kind}`, dir: "auto" },
    text.replace(/\n+$/, ""),
  );
  const block = h("div.block", null, pre);
  if (long) {
    pre.classList.add("folded");
    pre.style.setProperty("--lines", lines);
    const button = h(
      "button.unfold",
      { type: "button", "aria-expanded": "false" },
      foldWords(all.length, text.length),
    );
    button.onclick = () => {
      const open = pre.classList.toggle("folded") === false;
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? "show less" : foldWords(all.length, text.length);
    };
    block.append(button);
  }
  if (chars) {
    const more = h(
      "button.unfold",
      { type: "button" },
      `${grouped(chars - text.length)} more characters`,
    );
    more.onclick = async () => {
      more.disabled = true;
      const full = whole ? await whole() : null;
      if (typeof full === "string") block.replaceWith(textBlock(full, { kind, lines: 1e9, label }));
      else
        more.textContent = `${grouped(chars)} characters in total; this file contains only the beginning`;
    };
    block.append(more);
  }
  return block;
}

// What a model wrote as prose: with its formatting, once that has been loaded.
export function proseBlock(text, options) {
  const block = textBlock(text, options);
  if (hasMarkup(text)) format(block.querySelector(".said"), text);
  return block;
}

// Formats an element that has the plain `text`. `then` is called if it is still on the page.
export async function format(said, text, then = () => {}) {
  const formatted = optional.markdown ?? (await load("markdown"));
  fill(said, formatted(text));
  said.classList.add("formatted");
  if (said.isConnected) then();
}

function foldWords(lines, chars) {
  return lines > 1 ? `show all ${grouped(lines)} lines` : `show all ${grouped(chars)} characters`;
}
