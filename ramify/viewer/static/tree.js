// The recursion tree as a picture: time from left to right, depth from top to bottom, a bar for each call.
//
// Each depth is two bands: its sessions, and below them its plain calls, which are many and thin. Calls of one band that
// overlap get lanes; where there are more lanes than pixels, lanes lie on one another. In a session's bar the bright parts are requests to its model, the dark ones its code at work. What
// is under way grows with the clock.

import { h } from "./dom.js";
import { count, seconds, oneLine, stopWords } from "./format.js";

const AXIS = 20, GAP = 4, LEFT = 30, RIGHT = 10;
const LANES = [22, 9];  // most pixels of a lane: of sessions, of plain calls
const LEAST = [14, 8];  // of a whole band
const FRAME_MS = 33;  // between frames of a picture that grows

// A heap of [order, value], smallest order first.
class Heap {
  constructor() {
    this.items = [];
  }
  get size() {
    return this.items.length;
  }
  peek() {
    return this.items[0];
  }
  push(item) {
    const items = this.items;
    let at = items.push(item) - 1;
    while (at > 0) {
      const up = (at - 1) >> 1;
      if (items[up][0] <= items[at][0]) break;
      [items[up], items[at]] = [items[at], items[up]];
      at = up;
    }
  }
  pop() {
    const items = this.items, top = items[0], last = items.pop();
    if (items.length) {
      items[0] = last;
      let at = 0;
      for (;;) {
        const left = 2 * at + 1, right = left + 1;
        let least = at;
        if (left < items.length && items[left][0] < items[least][0]) least = left;
        if (right < items.length && items[right][0] < items[least][0]) least = right;
        if (least === at) break;
        [items[least], items[at]] = [items[at], items[least]];
        at = least;
      }
    }
    return top;
  }
}

// Which lane of its band each call lies in: the first that was free when it began. Band 2d holds the sessions of depth d,
// band 2d + 1 its plain calls.
class Lanes {
  constructor() {
    this.of = [];     // call -> lane
    this.bands = [];  // band -> { num, free, ending, calls }
    this.ended = [];  // call -> whether its end is known here
  }
  update(calls) {
    for (let index = 0; index < calls.length; index++) {
      const call = calls[index];
      if (index < this.of.length) {
        if (!this.ended[index] && call.ended_s !== null) this.end(index, call);
        continue;
      }
      const band = (this.bands[bandOf(call)] ||= emptyBand());
      while (band.ending.size && band.ending.peek()[0] <= call.started_s) {
        const lane = band.ending.pop()[1];
        band.free.push([lane, lane]);
      }
      this.of.push(band.free.size ? band.free.pop()[1] : band.num++);
      this.ended.push(false);
      band.calls.push(index);
      if (call.ended_s !== null) this.end(index, call);
    }
    for (let band = 0; band < this.bands.length; band++) this.bands[band] ||= emptyBand();
  }
  end(index, call) {
    this.ended[index] = true;
    this.bands[bandOf(call)].ending.push([call.ended_s, this.of[index]]);
  }
}

function bandOf(call) {
  return 2 * call.depth + (call.kind === "rlm" ? 0 : 1);
}

function emptyBand() {
  return { num: 0, free: new Heap(), ending: new Heap(), calls: [] };
}

export class Picture {
  // run: the page's model (run.js); pick(index): a call was clicked.
  constructor(run, pick) {
    this.run = run;
    this.pick = pick;
    this.lanes = new Lanes();
    this.from = 0;
    this.to = 1;
    this.zoomed = false;
    this.selected = -1;
    this.hovered = -1;
    this.mode = "kind";
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "the tree of calls over time; the list of calls below holds the same" });
    this.tip = h("div.tip", { hidden: true, role: "tooltip" });
    const button = (text, label, onclick) => h("button.tool", { type: "button", onclick, "aria-label": label, title: label }, text);
    this.legend = h("div.legend");
    this.modes = h("select", { "aria-label": "what colours mean", onchange: () => this.setMode(this.modes.value) },
      ["kind", "stop"].map((mode) => h("option", { value: mode }, `colour: ${mode}`)));
    this.element = h("section.picture", { "aria-label": "tree" },
      h("div.picture-tools", null, this.legend, this.modes,
        button("−", "zoom out", () => this.zoom(1.6)), button("+", "zoom in", () => this.zoom(1 / 1.6)), button("fit", "show all of it", () => this.fit())),
      h("div.canvas", null, this.canvas, this.tip));
    this.listen();
    this.sized = new ResizeObserver(() => this.later());
    this.sized.observe(this.canvas.parentElement);
    this.themed = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => {
      this.colours = null;
      this.later();
    };
    this.themed.addEventListener("change", this.recolour);
    addEventListener("ramify-theme", this.recolour);
    this.setMode("kind");
  }

  close() {
    this.sized.disconnect();
    this.themed.removeEventListener("change", this.recolour);
    removeEventListener("ramify-theme", this.recolour);
    this.closed = true;
  }

  setMode(mode) {
    this.mode = mode;
    const entries = mode === "kind"
      ? [["rlm", "rlm"], ["lm", "lm"], ["leaf", "leaf"], ["bad", "failed"]]
      : [["good", "final"], ["warn", "limit"], ["bad", "error"], ["live", "running"]];
    this.legend.replaceChildren(...entries.map(([swatch, text]) => h("span.key", null, h("i", { class: `sw-${swatch}` }), text)));
    this.later();
  }

  changed() {
    this.lanes.update(this.run.calls);
    this.later();
  }

  select(index) {
    this.selected = index;
    this.later();
  }

  end() {
    return Math.max(this.run.now(), 0.001);
  }

  fit() {
    this.zoomed = false;
    this.later();
  }

  zoom(factor, around = null) {
    if (!this.zoomed) [this.from, this.to] = [0, this.end()];
    const middle = around === null ? (this.from + this.to) / 2 : around;
    const span = Math.max((this.to - this.from) * factor, this.end() / 1e6);
    if (span >= this.end()) return this.fit();
    const share = (middle - this.from) / (this.to - this.from);
    this.from = Math.max(0, middle - share * span);
    this.to = this.from + span;
    this.zoomed = true;
    this.later();
  }

  zoomTo(call) {
    const end = call.ended_s ?? this.end(), margin = Math.max((end - call.started_s) * 0.05, this.end() / 1e5);
    [this.from, this.to] = [Math.max(0, call.started_s - margin), end + margin];
    this.zoomed = true;
    this.later();
  }

  later() {
    if (this.waiting || this.closed) return;
    this.waiting = true;
    requestAnimationFrame((at) => {
      this.waiting = false;
      this.draw();
      if (this.run.alive && !this.closed && !document.hidden) setTimeout(() => this.later(), FRAME_MS);
    });
  }

  // --- where things are -----------------------------------------------------------------------------------------

  layout(width, height) {
    const bands = this.lanes.bands, used = bands.filter((band) => band.num).length;
    const room = height - AXIS - GAP * Math.max(used - 1, 0) - 6;
    const heights = shared(bands.map((band, index) => band.num * LANES[index % 2]), bands.map((band, index) => (band.num ? LEAST[index % 2] : 0)),
      bands.map((band) => Math.sqrt(band.num)), room);
    let top = AXIS;
    this.bands = heights.map((tall, index) => {
      const found = { top, height: tall, lane: tall / Math.max(bands[index].num, 1), most: LANES[index % 2] };
      top += tall ? tall + GAP : 0;
      return found;
    });
    if (!this.zoomed) [this.from, this.to] = [0, this.end()];
    this.scale = (width - LEFT - RIGHT) / (this.to - this.from);
  }

  x(at) {
    return LEFT + (at - this.from) * this.scale;
  }

  // The call at a place; of several the one that lies on top, else the nearest within a few pixels.
  at(x, y) {
    const number = (this.bands || []).findIndex((band) => band.height && y >= band.top && y < band.top + band.height + GAP);
    if (number < 0) return -1;
    const band = this.bands[number], lane = (y - band.top) / band.lane, reach = Math.max(1, 3 / band.lane);
    let best = -1, least = Infinity;
    for (const index of this.lanes.bands[number].calls) {
      const call = this.run.calls[index], off = Math.abs(this.lanes.of[index] + 0.5 - lane);
      if (off > reach) continue;
      const left = this.x(call.started_s), right = Math.max(this.x(call.ended_s ?? this.end()), left + 2);
      const beside = x < left ? left - x : x > right ? x - right : 0;
      if (beside > 4) continue;
      const distance = beside + off * Math.min(band.lane, 8);
      if (distance <= least) [best, least] = [index, distance];
    }
    return best;
  }

  // --- drawing --------------------------------------------------------------------------------------------------

  paint() {
    if (this.colours) return this.colours;
    const style = getComputedStyle(document.documentElement), value = (name) => style.getPropertyValue(name).trim();
    const names = ["rlm", "rlm-dim", "lm", "leaf", "good", "bad", "warn", "live", "ink", "ink-2", "ink-3", "line", "paper", "on-bar"];
    return (this.colours = Object.fromEntries(names.map((name) => [name, value(`--${name}`)])));
  }

  colour(call) {
    const colours = this.paint();
    if (this.mode === "stop") return colours[call.stop ? stopWords(call.stop)[1] : this.run.alive ? "live" : "warn"];
    return call.stop === "error" ? colours.bad : colours[call.kind] || colours.lm;
  }

  draw() {
    const box = this.canvas.parentElement, width = box.clientWidth, height = box.clientHeight;
    if (!width || !height) return;
    const density = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * density) || this.canvas.height !== Math.round(height * density)) {
      this.canvas.width = Math.round(width * density);
      this.canvas.height = Math.round(height * density);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.layout(width, height);
    this.drawAxis(pen, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT - 1, AXIS - 2, width - LEFT - RIGHT + 2, height);
    pen.clip();
    const calls = this.run.calls;
    for (let index = 0; index < calls.length; index++) this.drawCall(pen, calls[index], index, width);
    this.drawSelected(pen, width);
    pen.restore();
    this.canvas.dataset.drawn = String(calls.length);
  }

  drawAxis(pen, width, height) {
    const colours = this.paint(), span = this.to - this.from;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "top";
    const rough = span / Math.max(2, (width - LEFT) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || power * 10;
    pen.strokeStyle = colours.line;
    pen.fillStyle = colours["ink-3"];
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, height);
      pen.stroke();
      if (x < width - 40) pen.fillText(axisWords(at, step), x + 3, 3);
    }
    pen.textBaseline = "middle";
    for (let depth = 0; 2 * depth < this.bands.length; depth++) {
      const band = this.bands[2 * depth].height ? this.bands[2 * depth] : this.bands[2 * depth + 1];
      if (band?.height) pen.fillText(String(depth), 12, band.top + Math.min(band.height, band.most) / 2);
    }
  }

  drawCall(pen, call, index, width) {
    const band = this.bands[bandOf(call)], end = call.ended_s ?? (this.run.alive ? this.end() : this.run.lastSeen());
    const left = this.x(call.started_s), right = this.x(end);
    if (right < LEFT - 2 || left > width) return;
    const x = Math.max(left, LEFT - 2), w = Math.max(Math.min(right, width) - x, 1.2);
    const lane = band.lane, pad = lane > 8 ? 1.5 : lane > 3 ? 0.75 : 0;
    const y = band.top + this.lanes.of[index] * lane + pad, tall = Math.max(Math.min(lane, band.most) - 2 * pad, 0.8);
    const colour = this.colour(call), colours = this.paint();
    const plain = call.kind !== "rlm" || this.mode === "stop" || !call.spans.length;
    pen.fillStyle = plain ? colour : call.stop === "error" ? colours.bad : colours["rlm-dim"];
    pen.fillRect(x, y, w, tall);
    if (!plain && w > 3) {
      pen.fillStyle = colour;
      for (let at = 0; at < call.spans.length; at += 2) {
        const asked = Math.max(this.x(call.spans[at]), x), replied = Math.min(this.x(call.spans[at + 1] ?? end), x + w);
        if (replied > asked) pen.fillRect(asked, y, Math.max(replied - asked, 1), tall);
      }
    }
    if (call.stop === null && this.run.alive) {
      pen.fillStyle = colours.live;
      pen.fillRect(Math.min(right, width) - 2, y, 2, tall);
    }
    if (tall >= 11 && w > 44) this.drawLabel(pen, call, Math.max(x, LEFT), y, w - Math.max(0, LEFT - x), tall);
  }

  drawLabel(pen, call, x, y, w, tall) {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, w - 4, tall);
    pen.clip();
    pen.font = "11px ui-monospace, monospace";
    pen.textBaseline = "middle";
    pen.fillStyle = this.paint()["on-bar"];
    pen.fillText(`${call.id}  ${oneLine(call.question, 80)}`, x + 5, y + tall / 2 + 0.5);
    pen.restore();
  }

  drawSelected(pen, width) {
    const colours = this.paint();
    const frame = (index, colour, thick) => {
      const call = this.run.calls[index];
      if (!call) return;
      const band = this.bands[bandOf(call)], x = this.x(call.started_s), right = this.x(call.ended_s ?? this.end());
      const y = band.top + this.lanes.of[index] * band.lane;
      pen.strokeStyle = colour;
      pen.lineWidth = thick;
      pen.strokeRect(x - 1, y - 0.5, Math.max(right - x, 2) + 2, Math.max(Math.min(band.lane, band.most), 3) + 1);
      pen.lineWidth = 1;
      return [x, y, Math.min(band.lane, band.most)];
    };
    let at = this.selected, below = null;
    for (let number = 0; at >= 0 && this.run.calls[at] && number < 50; number++) {
      const place = frame(at, number ? colours["ink-2"] : colours.ink, number ? 1 : 2);
      if (below && place) {
        pen.beginPath();
        pen.moveTo(below[0] - 1, below[1]);
        pen.lineTo(below[0] - 1, place[1] + place[2]);
        pen.stroke();
      }
      below = place;
      at = this.run.calls[at].parent;
    }
    if (this.hovered >= 0 && this.hovered !== this.selected) frame(this.hovered, colours["ink-2"], 1);
  }

  // --- pointing -------------------------------------------------------------------------------------------------

  listen() {
    const canvas = this.canvas;
    let dragged = null;
    canvas.addEventListener("pointerdown", (event) => {
      dragged = { x: event.clientX, from: this.from, to: this.to, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (dragged && event.buttons && Math.abs(event.clientX - dragged.x) > 4 && this.zoomed) {
        dragged.moved = true;
        canvas.setPointerCapture(event.pointerId);
        const by = Math.max(-dragged.from, (dragged.x - event.clientX) / this.scale);
        [this.from, this.to] = [dragged.from + by, dragged.to + by];
        this.hide();
        return this.later();
      }
      this.hover(event);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (dragged && !dragged.moved) {
        const index = this.at(event.offsetX, event.offsetY);
        if (index >= 0) this.pick(index);
      }
      dragged = null;
    });
    canvas.addEventListener("pointerleave", () => this.hide());
    canvas.addEventListener("dblclick", (event) => {
      const index = this.at(event.offsetX, event.offsetY);
      if (index >= 0) this.zoomTo(this.run.calls[index]);
      else this.fit();
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;  // a plain wheel scrolls the page
      event.preventDefault();
      this.zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, this.from + (event.offsetX - LEFT) / this.scale);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const act = { "+": () => this.zoom(1 / 1.6), "=": () => this.zoom(1 / 1.6), "-": () => this.zoom(1.6), 0: () => this.fit(),
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2) }[event.key];
      if (!act) return;
      event.preventDefault();
      event.stopPropagation();
      act();
    });
  }

  pan(share) {
    if (!this.zoomed) return;
    const by = Math.max(-this.from, share * (this.to - this.from));
    [this.from, this.to] = [this.from + by, this.to + by];
    this.later();
  }

  hover(event) {
    const index = this.at(event.offsetX, event.offsetY);
    this.canvas.style.cursor = index >= 0 ? "pointer" : this.zoomed ? "grab" : "default";
    if (index !== this.hovered) {
      this.hovered = index;
      this.later();
    }
    if (index < 0) return this.hide();
    const call = this.run.calls[index];
    this.tip.replaceChildren(
      h("b", null, `${call.id} `), `${call.kind} · ${call.model}`, h("br"),
      `${stopWords(call.stop, this.run.alive)[0]} · ${seconds((call.ended_s ?? this.end()) - call.started_s)} · ${count(call.tokens_in + call.tokens_out)} tokens`,
      h("p", null, oneLine(call.question, 110)), call.error ? h("p.bad", null, oneLine(call.error, 110)) : null || "");
    this.tip.hidden = false;
    const box = this.canvas.parentElement;
    this.tip.style.left = `${Math.max(4, Math.min(event.offsetX + 12, box.clientWidth - this.tip.offsetWidth - 6))}px`;
    this.tip.style.top = `${Math.min(event.offsetY + 14, Math.max(4, box.clientHeight - this.tip.offsetHeight - 4))}px`;
  }

  hide() {
    this.tip.hidden = true;
    if (this.hovered >= 0) {
      this.hovered = -1;
      this.later();
    }
  }
}

// Heights of bands: what each wants where there is room for all, else its least and by weight a share of the rest.
function shared(wanted, least, weights, room) {
  if (wanted.reduce((a, b) => a + b, 0) <= room) return wanted;
  const heights = least.map((each, index) => Math.min(each, wanted[index]));
  for (let round = 0; round < 6; round++) {
    const spare = room - heights.reduce((a, b) => a + b, 0);
    const open = wanted.map((each, index) => (heights[index] < each ? weights[index] : 0)), sum = open.reduce((a, b) => a + b, 0);
    if (spare < 1 || !sum) break;
    for (let index = 0; index < heights.length; index++) heights[index] = Math.min(wanted[index], heights[index] + (spare * open[index]) / sum);
  }
  return heights;
}

function axisWords(at, step) {
  if (step >= 1) return at >= 120 ? `${Math.floor(at / 60)}m${at % 60 ? ` ${Math.round(at % 60)}s` : ""}` : `${Math.round(at)} s`;
  if (step >= 0.1 || at >= 1) return `${Number(at.toFixed(3))} s`;
  if (step >= 0.001) return `${Math.round(at * 1000)} ms`;
  return `${Math.round(at * 1e6)} µs`;
}
