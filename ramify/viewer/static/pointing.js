// Mouse and keyboard handling of the picture: hover, click, drag, zoom and keys.

import { h } from "./dom.js";
import { count, many, number, oneLine, seconds, stopWords } from "./format.js";
import { LEFT } from "./strokes.js";

export function listen(picture) {
  const canvas = picture.canvas;
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { x: event.clientX, from: picture.from, to: picture.to, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged && event.buttons && Math.abs(event.clientX - dragged.x) > 4 && picture.zoomed) {
      dragged.moved = true;
      canvas.setPointerCapture(event.pointerId);
      const by = Math.max(-dragged.from, (dragged.x - event.clientX) / picture.scale);
      [picture.from, picture.to] = [dragged.from + by, dragged.to + by];
      hide(picture);
      return picture.later();
    }
    hover(picture, event);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (dragged && !dragged.moved) {
      const index = picture.at(event.offsetX, event.offsetY);
      if (index >= 0) picture.pick(index);
    }
    dragged = null;
  });
  canvas.addEventListener("pointerleave", () => hide(picture));
  canvas.addEventListener("dblclick", (event) => {
    const index = picture.at(event.offsetX, event.offsetY);
    if (index >= 0) picture.zoomTo(picture.run.calls[index]);
    else picture.fit();
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      // a plain wheel scrolls the page
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      picture.zoom(
        (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8,
        picture.from + (event.offsetX - LEFT) / picture.scale,
      );
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    const act = {
      "+": () => picture.zoom(1 / 1.6),
      "=": () => picture.zoom(1 / 1.6),
      "-": () => picture.zoom(1.6),
      0: () => picture.fit(),
      ArrowLeft: () => pan(picture, -0.2),
      ArrowRight: () => pan(picture, 0.2),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  });
}

function pan(picture, share) {
  if (!picture.zoomed) return;
  const by = Math.max(-picture.from, share * (picture.to - picture.from));
  [picture.from, picture.to] = [picture.from + by, picture.to + by];
  picture.later();
}

function hover(picture, event) {
  const index = picture.at(event.offsetX, event.offsetY);
  picture.canvas.style.cursor = index >= 0 ? "pointer" : picture.zoomed ? "grab" : "default";
  if (index !== picture.hovered) {
    picture.hovered = index;
    picture.later();
  }
  if (index < 0) return hide(picture);
  const call = picture.run.calls[index];
  picture.tip.replaceChildren(
    h("b", null, `${call.id} `),
    `${call.kind} · ${call.model}`,
    h("br"),
    `${stopWords(call.stop, picture.run.alive)[0]} · ${seconds((call.ended_s ?? picture.end()) - call.started_s)} · ${count(call.tokens_in + call.tokens_out)} tokens`,
    wordsOf(call),
    h("p", null, oneLine(call.question, 110)),
    call.error ? h("p.bad", null, oneLine(call.error, 110)) : "",
  );
  picture.tip.hidden = false;
  const box = picture.canvas.parentElement;
  picture.tip.style.left = `${Math.max(4, Math.min(event.offsetX + 12, box.clientWidth - picture.tip.offsetWidth - 6))}px`;
  picture.tip.style.top = `${Math.min(event.offsetY + 14, Math.max(4, box.clientHeight - picture.tip.offsetHeight - 4))}px`;
}

// Reward and number of tool calls; empty for most calls.
function wordsOf(call) {
  const named = call.scores
    .filter(([turn]) => turn < 0)
    .map(([, name, value]) => `${name} ${number(value)}`);
  const turns = call.scores.length - named.length,
    parts = [
      call.reward === null ? "" : `reward ${number(call.reward)}`,
      call.advantage === null ? "" : `advantage ${number(call.advantage)}`,
      call.gap === null ? "" : `gap ${number(call.gap)}`,
      ...named,
      turns ? many(turns, "turn score") : "",
      call.tools.length ? many(call.tools.length, "tool call") : "",
    ].filter(Boolean);
  return parts.length ? h("p", null, parts.join(" · ")) : "";
}

function hide(picture) {
  picture.tip.hidden = true;
  if (picture.hovered >= 0) {
    picture.hovered = -1;
    picture.later();
  }
}
