// Answers as Markdown, with tables and LaTeX. The vendored parser gives a tree of tokens; elements
// are made from it one by one, and no string becomes HTML. HTML in an answer stays text, and links
// and images are named with their address but load nothing.

import { load, optional } from "./api.js";
import { fencedCode } from "./code.js";
import { h } from "./dom.js";
import { Marked } from "./vendor/marked.js";

// A dollar sign is money if a space is inside it, or a digit comes after it.
/** @type {[RegExp, boolean][]} */
const MATH = [
  [/^\$\$([\s\S]+?)\$\$/, true],
  [/^\\\[([\s\S]+?)\\\]/, true],
  [/^\\\(([\s\S]+?)\\\)/, false],
  [/^\$(?=[^\s$])((?:\\.|[^$\\\n])*?(?:[^\s\\$]|\\.))\$(?![\d$])/, false],
];

function mathAt(source) {
  for (const [pattern, display] of MATH) {
    const match = pattern.exec(source);
    if (match) return { type: "math", raw: match[0], text: match[1].trim(), display };
  }
  return undefined;
}

const math = (level) => ({
  name: "math",
  level,
  start: (source) => source.match(/\$|\\[([]/)?.index,
  tokenizer: mathAt,
});
const marked = new Marked({ gfm: true, extensions: [math("inline")] });

const OWN_WAY = { dir: "auto" }; // from right to left if the first letter is

// The elements of a Markdown text.
function formatted(text) {
  return blocks(marked.lexer(text));
}

// `way` is null inside of a block that decides the direction for its parts.
function blocks(tokens, way = OWN_WAY) {
  return tokens.map((token) => {
    switch (token.type) {
      case "space":
      case "def":
        return null;
      case "heading":
        return h("p.md-heading", way, inline(token.tokens)); // not a heading of the page
      case "paragraph":
        return h("p", way, inline(token.tokens));
      case "text":
        return token.tokens ? inline(token.tokens) : token.text;
      case "code":
        return fencedCode(token.text, (token.lang || "").split(/\s/)[0]);
      case "blockquote":
        return h("blockquote", OWN_WAY, blocks(token.tokens, null));
      case "hr":
        return h("hr");
      case "list":
        return h(
          token.ordered ? "ol" : "ul",
          { ...way, start: token.ordered && token.start !== 1 ? token.start : null },
          token.items.map((item) =>
            h(
              "li",
              null,
              item.task ? (item.checked ? "☑ " : "☐ ") : null,
              blocks(
                item.tokens.filter((each) => each.type !== "checkbox"),
                null,
              ),
            ),
          ),
        );
      case "table":
        return h(
          "div.md-table",
          { tabindex: "0", role: "group", "aria-label": "table" },
          h(
            "table",
            null,
            h(
              "thead",
              null,
              h(
                "tr",
                null,
                token.header.map((cell) =>
                  h(
                    "th",
                    { ...OWN_WAY, scope: "col", class: cell.align || "" },
                    inline(cell.tokens),
                  ),
                ),
              ),
            ),
            h(
              "tbody",
              null,
              token.rows.map((row) =>
                h(
                  "tr",
                  null,
                  row.map((cell) =>
                    h("td", { ...OWN_WAY, class: cell.align || "" }, inline(cell.tokens)),
                  ),
                ),
              ),
            ),
          ),
        );
      default:
        return h("p", way, inlineOf(token));
    }
  });
}

function inline(tokens) {
  return tokens.map(inlineOf);
}

function inlineOf(token) {
  switch (token.type) {
    case "strong":
      return h("strong", null, inline(token.tokens));
    case "em":
      return h("em", null, inline(token.tokens));
    case "del":
      return h("del", null, inline(token.tokens));
    case "codespan":
      return h("code", { dir: "ltr" }, token.text);
    case "br":
      return h("br");
    case "math":
      return mathOf(token);
    case "link":
      return [
        h("span.md-link", null, inline(token.tokens)),
        token.text === token.href ? null : ` (${token.href})`,
      ];
    case "image":
      return `${token.text || "image"} (${token.href})`;
    case "text":
      return token.tokens ? inline(token.tokens) : token.text;
    default:
      return token.text ?? token.raw;
  }
}

// The formula's source, until it is drawn; a formula with an unknown command stays its source. The
// source stays beside it, since places in the text count its characters (provenance.js).
function mathOf({ text, raw, display }) {
  const place = h(
    display ? "div.md-math" : "span.md-math",
    { dir: "ltr", "data-formula": raw },
    h("code", null, raw),
  );
  load("latex").then((draw) => {
    const drawn = draw(text, display);
    if (drawn) place.replaceChildren(drawn);
  });
  return place;
}

optional.markdown = formatted;
