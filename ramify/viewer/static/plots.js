// One plot of a training page: lines with their bands on one or two axes, stages, and a mark where
// an alarm was raised. What is drawn is chosen in curves.js.

import { aligned } from "./curves.js";
import { h } from "./dom.js";
import { count, number, seconds } from "./format.js";
import uPlot from "./vendor/uplot.js";

/**
 * What a plot shows.
 * @typedef {object} Picture
 * @property {{ label: string, colour: string, dash: number[], isRight: boolean, points: import("./curves.js").Points }[]} lines
 * @property {{ words: string, x: number, y: number | null, isRight: boolean }[]} marks alarms
 * @property {[string, number][]} stages name and place of its beginning
 * @property {string} unit of the horizontal axis
 * @property {boolean} isLog
 */

const HEIGHT = 180;
const MAX_POINTS = 60; // of a line whose points are drawn as dots

// The part of an axis that is drawn: a margin around the values. Values that differ in their last
// digits alone are drawn as equal, since no tick can tell them apart.
function spread(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high)),
    margin = Math.max(0.08 * (high - low), 1e-3 * size) || 1;
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
}

function tickWords(value) {
  return number(value).replace(/\.?0+e/, "e");
}

export class TrainingPlot {
  // picked(index of the point under the pointer, or null), clicked(place on the horizontal axis)
  constructor(name, { picked, clicked }) {
    this.name = name;
    this.picked = picked;
    this.clicked = clicked;
    this.holder = h("div.plot");
    this.plot = null;
    this.form = "";
  }

  /** @param {Picture} picture */
  draw(picture) {
    this.picture = picture;
    const { lines, isLog } = picture,
      data = this.values();
    // Lines, axes and colours of a plot are fixed when it is made; its points are not.
    const form = JSON.stringify([
      lines.map((line) => [line.label, line.colour, line.dash, line.isRight, !!line.points.low]),
      picture.unit,
      isLog,
      data[0].length < MAX_POINTS,
    ]);
    if (this.plot && form === this.form) this.plot.setData(data);
    else {
      this.destroy();
      this.form = form;
      this.plot = this.made(data);
    }
  }

  // [x, a value of each line, then low and high of each line with a band]
  values() {
    const { lines, isLog } = this.picture,
      drawn = (values) => (isLog ? values.map((each) => (each > 0 ? each : null)) : values),
      banded = lines.filter((line) => line.points.low);
    return aligned([
      ...lines.map(({ points }) => ({ x: points.x, values: drawn(points.y) })),
      ...banded.flatMap(({ points }) => [
        { x: points.x, values: drawn(points.low) },
        { x: points.x, values: drawn(points.high) },
      ]),
    ]);
  }

  made(data) {
    const style = getComputedStyle(document.documentElement),
      colour = (each) => style.getPropertyValue(each).trim(),
      { lines, isLog, unit } = this.picture;
    const axis = {
      stroke: colour("--ink-3"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 },
      font: "11px system-ui",
    };
    const ticks = (write) => (_, values) =>
      values.map((each) => (each === null || each === undefined ? "" : write(each)));
    const scaleOf = (line) => (line.isRight ? "right" : "y"),
      hasRight = lines.some((line) => line.isRight),
      banded = lines.filter((line) => line.points.low);
    const edge = (line) => ({
      label: "",
      scale: scaleOf(line),
      stroke: "transparent",
      width: 0,
      spanGaps: true,
      points: { show: false },
    });
    const series = [
      { label: unit },
      ...lines.map((line) => ({
        label: line.label,
        scale: scaleOf(line),
        stroke: colour(line.colour),
        width: 1.6,
        dash: line.dash,
        spanGaps: true,
        points: { show: data[0].length < MAX_POINTS, size: 4 },
      })),
      ...banded.flatMap((line) => [edge(line), edge(line)]),
    ];
    const bands = banded.map((line, index) => ({
      series: [lines.length + 2 + 2 * index, lines.length + 1 + 2 * index],
      fill: `${colour(line.colour)}2e`, // the colours are written as #rrggbb
    }));
    // A logarithmic axis needs a positive value; a plot without one stays linear.
    const isPositive = (isRight) =>
      lines.some((line) => line.isRight === isRight && line.points.y.some((each) => each > 0));
    const scale = (isRight) => (isLog && isPositive(isRight) ? { distr: 3 } : { range: spread });
    const places = { step: number, seconds, tokens: count }[unit];
    const plot = new uPlot(
      {
        width: Math.max(this.holder.clientWidth, 200),
        height: HEIGHT,
        series,
        bands,
        scales: { x: { time: false }, y: scale(false), right: scale(true) },
        legend: { show: false },
        padding: [8, hasRight ? 0 : 10, 0, 0],
        axes: [
          { ...axis, size: 26, space: 70, values: ticks(places) },
          { ...axis, size: 54, values: ticks(tickWords) },
          ...(hasRight
            ? [
                {
                  ...axis,
                  scale: "right",
                  side: 1,
                  size: 54,
                  grid: { show: false },
                  values: ticks(tickWords),
                },
              ]
            : []),
        ],
        cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: { key: "training" } },
        hooks: {
          setCursor: [
            (self) =>
              this.picked(self.cursor.left < 0 ? null : (self.cursor.idx ?? null), self.data),
          ],
          draw: [(self) => this.annotate(self, colour)],
        },
      },
      data,
      this.holder,
    );
    plot.over.addEventListener("click", () => {
      const at = plot.cursor.idx;
      if (at !== null && at !== undefined) this.clicked(plot.data[0][at]);
    });
    return plot;
  }

  // Stages begin at a dashed line. An alarm is a triangle on the curve; its first one has its name.
  annotate(plot, colour) {
    const pen = plot.ctx,
      { left, top, width, height } = plot.bbox,
      dot = devicePixelRatio;
    pen.save();
    pen.font = `${10 * dot}px system-ui`;
    pen.textAlign = "left";
    const line = (x, style) => {
      pen.strokeStyle = style;
      pen.setLineDash([3 * dot, 3 * dot]);
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
      pen.stroke();
    };
    const isInside = (x) => x >= left - 1 && x <= left + width + 1;
    const write = (words, x, y) => {
      const gap = 4 * dot,
        wide = pen.measureText(words).width + gap;
      pen.fillText(words, x + wide > left + width ? Math.max(left, x - wide) : x + gap, y);
    };
    for (const [name, place] of this.picture.stages) {
      const x = plot.valToPos(place, "x", true);
      if (!isInside(x)) continue;
      line(x, colour("--line-2"));
      pen.fillStyle = colour("--ink-3");
      write(name, x, top + 10 * dot);
    }
    const named = new Set();
    for (const { words, x: place, y: value, isRight } of this.picture.marks) {
      const x = plot.valToPos(place, "x", true);
      if (!isInside(x)) continue;
      line(x, colour("--bad"));
      const scale = isRight ? "right" : "y",
        y = value === null ? top + height - 6 * dot : plot.valToPos(value, scale, true);
      pen.fillStyle = colour("--bad");
      pen.setLineDash([]);
      pen.beginPath();
      pen.moveTo(x, y - 6 * dot);
      pen.lineTo(x + 5 * dot, y + 4 * dot);
      pen.lineTo(x - 5 * dot, y + 4 * dot);
      pen.fill();
      if (!named.has(words)) write(words, x, top + (10 + 12 * named.size) * dot);
      named.add(words);
    }
    pen.restore();
  }

  size() {
    const width = this.holder.clientWidth;
    if (this.plot && width && Math.abs(width - this.plot.width) > 1)
      this.plot.setSize({ width, height: HEIGHT });
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }
}
