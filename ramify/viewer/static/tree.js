// The call tree as a picture: time from left to right, depth from top to bottom, a bar for each
// call. Or each bar is as wide as what its call used (measures.js), in the order of the list.
//
// Each depth has two bands: its sessions, and below them its plain calls, which are many and thin.
// Overlapping calls of a band get separate lanes; if there are more lanes than pixels, lanes
// overlap. Bars of running calls grow with the clock. Not here: layout (lanes.js), drawing
// (strokes.js), mouse and keyboard (pointing.js).

import { h } from "./dom.js";
import { seconds, stopWords } from "./format.js";
import { Lanes, shared } from "./lanes.js";
import { MEASURES, MeasuredSpans } from "./measures.js";
import { listen } from "./pointing.js";
import {
  AXIS,
  drawAxis,
  drawCall,
  drawSelected,
  LARGE_GAP,
  LEFT,
  measureColour,
  RIGHT,
  shareColour,
  shareOf,
  worthColour,
} from "./strokes.js";

const GAP = 4;
const LANES = [22, 9]; // maximum pixels of a lane: sessions, plain calls
const LEAST = [14, 8]; // minimum pixels of a band
const TALLEST = 0.22; // share of the window that the strip may fill
const FRAME_MS = 33; // between frames of a growing picture

export class Picture {
  // run: the page's model (run.js); pick(index) is called when a call is clicked.
  constructor(run, pick) {
    this.run = run;
    this.pick = pick;
    this.timed = new Lanes(run);
    /** @type {Lanes | MeasuredSpans} */
    this.lanes = this.timed;
    this.order = "start"; // or a field of MEASURES
    this.onorder = null; // called with the chosen order
    this.only = null; // Set of the calls that the list's filter keeps
    this.from = 0;
    this.to = 1;
    this.zoomed = false;
    this.selected = -1;
    this.hovered = -1;
    this.mode = "stop";
    this.canvas = h("canvas", {
      tabindex: "0",
      role: "img",
      "aria-label": "the tree of calls over time; the list of calls below holds the same",
    });
    this.tip = h("div.tip", { hidden: true, role: "tooltip" });
    const button = (text, label, onclick) =>
      h("button.tool", { type: "button", onclick, "aria-label": label, title: label }, text);
    this.legend = h("div.legend");
    this.modes = h(
      "select",
      { "aria-label": "what colours mean", onchange: () => this.setMode(this.modes.value) },
      [
        ["stop", "outcome"],
        ["reward", "reward"],
        ["advantage", "advantage"],
        ["gap", "log-probability gap"],
        ...Object.entries(MEASURES).map(([field, { words }]) => [field, words]),
      ].map(([mode, name]) => h("option", { value: mode }, `colour: ${name}`)),
    );
    this.orders = h(
      "select",
      {
        "aria-label": "what positions mean",
        onchange: () => this.onorder?.(this.orders.value === "start" ? "" : this.orders.value),
      },
      [
        ["start", "start"],
        ...Object.entries(MEASURES).map(([field, { words }]) => [field, words]),
      ].map(([order, name]) => h("option", { value: order }, `order: ${name}`)),
    );
    this.startUp = h("span.start-up", { hidden: true });
    this.frame = h("div.canvas", null, this.canvas, this.tip);
    this.element = h(
      "section.picture",
      { "aria-label": "tree" },
      h(
        "div.picture-tools",
        null,
        this.startUp,
        this.legend,
        this.orders,
        this.modes,
        button("−", "zoom out", () => this.zoom(1.6)),
        button("+", "zoom in", () => this.zoom(1 / 1.6)),
        button("fit", "fit: show all of it", () => this.fit()),
      ),
      this.frame,
    );
    listen(this);
    this.sized = new ResizeObserver(() => this.later());
    this.sized.observe(this.canvas.parentElement);
    this.themed = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => {
      this.colours = null;
      this.later();
    };
    this.themed.addEventListener("change", this.recolour);
    addEventListener("ramify-theme", this.recolour);
    this.setMode("stop");
  }

  close() {
    this.sized.disconnect();
    this.themed.removeEventListener("change", this.recolour);
    removeEventListener("ramify-theme", this.recolour);
    this.closed = true;
  }

  setMode(mode) {
    this.mode = mode;
    this.most = 0;
    this.measureMost();
    this.drawLegend();
    this.later();
  }

  drawLegend() {
    const entries = {
      stop: [
        ["fine", "final"],
        ["warn", "limit"],
        ["bad", "error"],
        ["live", "running"],
        ["odd", "differs"],
      ],
      reward: [
        ["good", "best"],
        ["bad", "worst"],
        ["none", "not scored"],
      ],
      advantage: [
        ["good", "above 0"],
        ["bad", "below 0"],
        ["none", "not trained on"],
      ],
      gap: [
        ["odd", `${LARGE_GAP} nats or more`],
        ["none", "not scored"],
      ],
    }[this.mode] ?? [
      ["none", "less"],
      ["most", `more${this.most ? `, up to ${MEASURES[this.mode].shown(this.most)}` : ""}`],
    ];
    this.legend.replaceChildren(
      ...entries.map(([swatch, text]) =>
        h("span.key", null, h("i", { class: `sw-${swatch}` }), text),
      ),
    );
  }

  // Position bars by time ("start"), or by what calls used.
  setOrder(wanted) {
    const order = wanted !== "start" && this.hasMode(wanted) ? wanted : "start";
    if (order === this.order) return;
    this.order = this.orders.value = order;
    this.lanes = order === "start" ? this.timed : new MeasuredSpans(order);
    this.zoomed = false;
    this.changed();
  }

  // Fade all other calls; null shows all.
  setOnly(calls) {
    this.only = calls;
    this.later();
  }

  changed() {
    this.timed.update(this.run);
    if (this.lanes !== this.timed) this.lanes.update(this.run);
    this.worth = null;
    this.mostAdvantage = this.run.calls.reduce(
      (most, { advantage }) => Math.max(most, Math.abs(advantage)),
      0,
    );
    this.measureMost();
    for (const option of this.modes.options) option.hidden = !this.hasMode(option.value);
    this.resize();
    this.later();
  }

  // As tall as its lanes need; hidden for a run of one plain call, which has no tree.
  resize() {
    const calls = this.run.calls,
      start = this.start();
    this.element.hidden = !calls.length || (calls.length === 1 && calls[0].kind !== "rlm");
    const bands = this.lanes.bands.filter((band) => band.num),
      gaps = GAP * Math.max(bands.length - 1, 0);
    const tall = this.lanes.bands.reduce(
      (sum, band, index) => sum + band.num * LANES[index % 2],
      AXIS + gaps + 8,
    );
    const least = AXIS + gaps + 8 + bands.length * LEAST[0];
    const height = Math.min(tall, Math.max(least, Math.round(TALLEST * innerHeight)));
    if (height !== this.height) this.frame.style.height = `${height}px`;
    this.height = height;
    this.startUp.hidden = start < 0.0005 || this.order !== "start";
    const said = `start-up ${seconds(start)}`;
    if (this.startUp.textContent !== said) this.startUp.textContent = said;
  }

  start() {
    return this.lanes.start();
  }

  select(index) {
    this.selected = index;
    this.later();
  }

  end() {
    return this.lanes.end();
  }

  fit() {
    this.zoomed = false;
    this.later();
  }

  zoom(factor, around = null) {
    if (!this.zoomed) [this.from, this.to] = [this.start(), this.end()];
    const middle = around === null ? (this.from + this.to) / 2 : around;
    const span = Math.max((this.to - this.from) * factor, this.end() / 1e6);
    if (span >= this.end() - this.start()) return this.fit();
    const share = (middle - this.from) / (this.to - this.from);
    this.from = Math.max(this.start(), middle - share * span);
    this.to = this.from + span;
    this.zoomed = true;
    this.later();
  }

  zoomTo(call) {
    const [start, end] = this.lanes.edges(this.run.indexOf(call.id)),
      margin = Math.max((end - start) * 0.05, this.end() / 1e5);
    [this.from, this.to] = [Math.max(0, start - margin), end + margin];
    this.zoomed = true;
    this.later();
  }

  later() {
    if (this.waiting || this.closed) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
      if (this.run.alive && !this.closed && !document.hidden)
        setTimeout(() => this.later(), FRAME_MS);
    });
  }

  // --- positions ---------------------------------------------------------------------------------

  layout(width, height) {
    const bands = this.lanes.bands,
      used = bands.filter((band) => band.num).length;
    const room = height - AXIS - GAP * Math.max(used - 1, 0) - 6;
    const heights = shared(
      bands.map((band, index) => band.num * LANES[index % 2]),
      bands.map((band, index) => (band.num ? LEAST[index % 2] : 0)),
      bands.map((band) => Math.sqrt(band.num)),
      room,
    );
    let top = AXIS;
    this.bands = heights.map((tall, index) => {
      const found = {
        top,
        height: tall,
        lane: tall / Math.max(bands[index].num, 1),
        most: LANES[index % 2],
      };
      top += tall ? tall + GAP : 0;
      return found;
    });
    if (!this.zoomed) [this.from, this.to] = [this.start(), this.end()];
    this.scale = (width - LEFT - RIGHT) / (this.to - this.from);
  }

  x(at) {
    return LEFT + (at - this.from) * this.scale;
  }

  // The topmost call at a position, or the nearest one within a few pixels.
  at(x, y) {
    const number = (this.bands || []).findIndex(
      (band) => band.height && y >= band.top && y < band.top + band.height + GAP,
    );
    if (number < 0) return -1;
    const band = this.bands[number],
      lane = (y - band.top) / band.lane,
      reach = Math.max(1, 3 / band.lane);
    let best = -1,
      least = Infinity;
    for (const index of this.lanes.bands[number].calls) {
      const off = Math.abs(this.lanes.of[index] + 0.5 - lane);
      if (off > reach) continue;
      const [start, end] = this.lanes.edges(index),
        left = this.x(start),
        right = Math.max(this.x(end), left + 2);
      const beside = x < left ? left - x : x > right ? x - right : 0;
      if (beside > 4) continue;
      const distance = beside + off * Math.min(band.lane, 8);
      if (distance <= least) [best, least] = [index, distance];
    }
    return best;
  }

  // --- drawing -----------------------------------------------------------------------------------

  paint() {
    if (this.colours) return this.colours;
    const style = getComputedStyle(document.documentElement),
      value = (name) => style.getPropertyValue(name).trim();
    const names = [
      "fine",
      "good",
      "bad",
      "warn",
      "live",
      "link",
      "odd",
      "ink",
      "ink-2",
      "ink-3",
      "line",
      "line-2",
      "paper",
      "on-bar",
    ];
    this.colours = Object.fromEntries(names.map((name) => [name, value(`--${name}`)]));
    return this.colours;
  }

  // Whether the calls have what a colour would say.
  hasMode(mode) {
    if (mode === "stop") return true;
    if (mode === "reward") return Boolean(this.range());
    return this.run.calls.some((call) => call[mode] !== null);
  }

  // [minimum, maximum] reward of all calls, or null without rewards.
  range() {
    if (this.worth === null) {
      let least = Infinity,
        most = -Infinity;
      for (const { reward } of this.run.calls) {
        if (reward === null) continue;
        if (reward < least) least = reward;
        if (reward > most) most = reward;
      }
      this.worth = least > most ? undefined : [Math.min(least, 0), Math.max(most, 1)];
    }
    return this.worth;
  }

  // The largest value of the measure that colours show.
  measureMost() {
    const measure = MEASURES[this.mode];
    if (!measure) return;
    const now = this.run.now();
    let most = 0;
    for (const call of this.run.calls) most = Math.max(most, measure.of(call, now) || 0);
    if (most === this.most) return;
    this.most = most;
    this.drawLegend();
  }

  colour(call) {
    const colours = this.paint(),
      measure = MEASURES[this.mode];
    if (measure) return measureColour(colours, measure.of(call, this.run.now()), this.most);
    if (this.mode === "reward") return worthColour(colours, call.reward, this.range());
    if (this.mode === "gap") return shareColour(colours, "odd", call.gap, LARGE_GAP);
    if (this.mode === "advantage")
      return shareColour(
        colours,
        call.advantage < 0 ? "bad" : "good",
        call.advantage,
        this.mostAdvantage,
      );
    return colours[
      call.outlier && !call.failed
        ? "odd"
        : call.failed
          ? "bad"
          : call.stop
            ? stopWords(call.stop)[1]
            : this.run.alive
              ? "live"
              : "warn"
    ];
  }

  // Colour of words on a bar.
  inkOn(call, colour) {
    const colours = this.paint(),
      measure = MEASURES[this.mode];
    if (measure)
      return shareOf(measure.of(call, this.run.now()), this.most) > 0.5
        ? colours.paper
        : colours.ink;
    return colour === colours.fine ? colours.ink : colours["on-bar"];
  }

  draw() {
    const box = this.canvas.parentElement,
      width = box.clientWidth,
      height = box.clientHeight;
    this.canvas.dataset.drawn = String(this.run.calls.length);
    if (!width || !height) return; // hidden
    const density = devicePixelRatio || 1;
    if (
      this.canvas.width !== Math.round(width * density) ||
      this.canvas.height !== Math.round(height * density)
    ) {
      this.canvas.width = Math.round(width * density);
      this.canvas.height = Math.round(height * density);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.layout(width, height);
    drawAxis(this, pen, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT - 1, AXIS - 2, width - LEFT - RIGHT + 2, height);
    pen.clip();
    const calls = this.run.calls;
    for (let index = 0; index < calls.length; index++)
      drawCall(this, pen, calls[index], index, width);
    drawSelected(this, pen);
    pen.restore();
  }
}
