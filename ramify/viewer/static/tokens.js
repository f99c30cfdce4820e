// The tokens of one turn as a strip: prompt tokens are plain, sampled tokens are colored by
// log-probability, advantage, the gap between trainer and sampler, or policy version.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { grouped, number } from "./format.js";
import { LARGE_GAP } from "./strokes.js";

const MAX_SHOWN = 4000; // tokens at once; more on request

export async function tokenStrip(holder, key, call, turn) {
  if (holder.firstChild) return fill(holder);
  fill(holder, h("p.quiet", null, "Loading …"));
  try {
    const found = await get("/api/tokens", { key, id: call, turn });
    drawStrip(holder, found);
  } catch (error) {
    fill(holder, h("p.problem", null, error.message));
  }
}

function drawStrip(holder, found) {
  const modes = [
    ...["logprob", "advantage", "gap", "version"].filter((name) => found[`${name}s`]),
    ...Object.keys(found.scores),
  ];
  const about = h("p.about", { "aria-live": "polite" }, summary(found));
  const strip = h("div.strip", { tabindex: "0", role: "group", "aria-label": "tokens" });
  const choose = h(
    "select",
    { "aria-label": "token colour" },
    modes.map((name) => h("option", { value: name }, `colour: ${name}`)),
  );
  const given = h("label", null, h("input", { type: "checkbox" }), " prompt tokens");
  const draw = (most) => {
    const start = given.firstChild.checked ? 0 : found.given.length;
    const all = [...found.given, ...found.sampled].slice(start);
    const tokens = all
      .slice(0, most)
      .map((id, index) => token(found, id, start + index, choose.value));
    fill(
      strip,
      tokens,
      all.length > most
        ? h(
            "button.small",
            { type: "button", onclick: () => draw(all.length) },
            `${grouped(all.length - most)} more`,
          )
        : null,
    );
  };
  const say = (event) => {
    const at = event.target.closest("[data-at]");
    if (at) fill(about, describe(found, Number(at.dataset.at)));
  };
  strip.addEventListener("mouseover", say);
  strip.addEventListener("click", say);
  choose.onchange = () => draw(MAX_SHOWN);
  given.firstChild.onchange = () => draw(MAX_SHOWN);
  draw(MAX_SHOWN);
  fill(
    holder,
    h(
      "div.strip-tools",
      null,
      modes.length ? choose : null,
      found.given.length ? given : null,
      about,
    ),
    strip,
  );
}

function summary(found) {
  const parts = [
    `${grouped(found.reused)} from earlier turns, ${grouped(found.given.length)} new in the prompt, ${grouped(found.sampled.length)} sampled`,
  ];
  if (found.logprobs?.length)
    parts.push(
      `mean logprob ${number(found.logprobs.reduce((a, b) => a + b, 0) / found.logprobs.length)}`,
    );
  if (found.advantages) {
    const unique = [...new Set(found.advantages)];
    parts.push(unique.length === 1 ? `advantage ${number(unique[0])}` : "advantages differ");
  }
  if (found.gaps?.length)
    parts.push(
      `largest gap ${number(found.gaps.reduce((most, each) => Math.max(most, Math.abs(each)), 0))}`,
    );
  if (found.versions) parts.push(`version ${[...new Set(found.versions)].join(", ")}`);
  return parts.join(" · ");
}

function describe(found, at) {
  const id = [...found.given, ...found.sampled][at],
    index = at - found.given.length,
    text = found.texts ? ` ${JSON.stringify(found.texts[at])}` : "";
  if (index < 0) return `token ${id}${text} · prompt`;
  const parts = [`token ${id}${text}`, "sampled"];
  if (found.logprobs)
    parts.push(
      `logprob ${number(found.logprobs[index])} (p ${number(Math.exp(found.logprobs[index]))})`,
    );
  if (found.advantages) parts.push(`advantage ${number(found.advantages[index])}`);
  if (found.gaps) parts.push(`gap to the trainer ${number(found.gaps[index])}`);
  for (const [name, values] of Object.entries(found.scores))
    parts.push(`${name} ${number(values[index])}`);
  if (found.versions) parts.push(`version ${found.versions[index]}`);
  return parts.join(" · ");
}

function token(found, id, at, mode) {
  const index = at - found.given.length;
  const text = found.texts ? visible(found.texts[at]) : String(id);
  const element = h(
    "span.tok",
    { "data-at": String(at), class: index < 0 ? "given" : "sampled" },
    text || "·",
  );
  if (index >= 0) {
    const [tone, strength] = colouring(found, index, mode);
    if (tone) {
      element.classList.add(`t-${tone}`);
      element.style.setProperty("--strength", strength.toFixed(2));
    }
  }
  if (found.texts?.[at].includes("\n")) return [element, h("br")];
  return element;
}

// [tone, 0…1]: unlikely tokens and large gaps are strong; advantages are good or bad by size; versions alternate.
/** @returns {[string, number]} */
function colouring(found, index, mode) {
  if (mode === "logprob" && found.logprobs) return ["odd", Math.min(1, -found.logprobs[index] / 4)];
  if (mode === "gap" && found.gaps)
    return ["odd", Math.min(1, Math.abs(found.gaps[index]) / LARGE_GAP)];
  const signed = mode === "advantage" ? found.advantages : found.scores[mode];
  if (signed) {
    const most = signed.reduce((most, each) => Math.max(most, Math.abs(each)), 1e-9),
      value = signed[index];
    return [value >= 0 ? "good" : "bad", Math.abs(value) / most];
  }
  if (mode === "version" && found.versions)
    return [["one", "two", "three"][((found.versions[index] % 3) + 3) % 3], 0.6];
  return ["", 0];
}

function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}
