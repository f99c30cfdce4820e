// Draws the picture: the axis, a bar with its events for each call, and frames around the hovered
// and the chosen call.
//
// In a session's bar, bright parts are model requests and pale parts are running code. A light tick
// is a tool's answer, a red one its failure. A dot below is a scored turn: green above zero, else
// red.

import { oneLine } from "./format.js";

export const AXIS = 20,
  LEFT = 30,
  RIGHT = 10; // pixels around the bars

export function drawAxis(picture, pen, width, height) {
  const colours = picture.paint(),
    span = picture.to - picture.from;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "top";
  const rough = span / Math.max(2, (width - LEFT) / 110),
    power = 10 ** Math.floor(Math.log10(rough));
  const step =
    [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || power * 10;
  pen.strokeStyle = colours.line;
  pen.fillStyle = colours["ink-3"];
  for (let at = Math.ceil(picture.from / step) * step; at <= picture.to; at += step) {
    const x = Math.round(picture.x(at)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, AXIS - 4);
    pen.lineTo(x, height);
    pen.stroke();
    if (x < width - 40) pen.fillText(picture.lanes.axisWords(at, step), x + 3, 3);
  }
  pen.textBaseline = "middle";
  for (let depth = 0; 2 * depth < picture.bands.length; depth++) {
    const band = picture.bands[2 * depth].height
      ? picture.bands[2 * depth]
      : picture.bands[2 * depth + 1];
    if (band?.height)
      pen.fillText(String(depth), 12, band.top + Math.min(band.height, band.most) / 2);
  }
}

export function drawCall(picture, pen, call, index, width) {
  const band = picture.bands[picture.lanes.bandOf(call)],
    [start, end] = picture.lanes.edges(index),
    isTime = picture.order === "start";
  const left = picture.x(start),
    right = picture.x(end);
  if (right < LEFT - 2 || left > width) return;
  const x = Math.max(left, LEFT - 2),
    w = Math.max(Math.min(right, width) - x, 1.2);
  const lane = band.lane,
    pad = lane > 8 ? 1.5 : lane > 3 ? 0.75 : 0;
  const y = band.top + picture.lanes.of[index] * lane + pad,
    tall = Math.max(Math.min(lane, band.most) - 2 * pad, 0.8);
  const colour = picture.colour(call),
    colours = picture.paint();
  const plain = !isTime || call.kind !== "rlm" || !call.spans.length,
    seen = picture.only && !picture.only.has(index) ? 0.15 : 1; // the filter of the list
  pen.fillStyle = colour;
  pen.globalAlpha = (plain ? 1 : 0.55) * seen;
  pen.fillRect(x, y, isTime ? w : Math.max(w - 1, 0.6), tall);
  pen.globalAlpha = seen;
  if (!plain && w > 3) {
    pen.fillStyle = colour;
    for (let at = 0; at < call.spans.length; at += 2) {
      const asked = Math.max(picture.x(call.spans[at]), x),
        replied = Math.min(picture.x(call.spans[at + 1] ?? end), x + w);
      if (replied > asked) pen.fillRect(asked, y, Math.max(replied - asked, 1), tall);
    }
  }
  pen.globalAlpha = 1;
  if (isTime && call.stop === null && picture.run.alive) {
    pen.fillStyle = colours.live;
    pen.fillRect(Math.min(right, width) - 2, y, 2, tall);
  }
  if (isTime && call.tools.length && tall > 4) drawTools(picture, pen, call, y, tall);
  if (isTime && call.scores.length && tall > 4) drawScores(picture, pen, call, x, w, y + tall - 3);
  if (tall >= 11 && w > 44 && seen === 1)
    drawLabel(pen, call, {
      x: Math.max(x, LEFT),
      y,
      w: w - Math.max(0, LEFT - x),
      tall,
      ink: picture.inkOn(call, colour),
    });
}

function drawTools(picture, pen, call, y, tall) {
  const colours = picture.paint();
  for (const [at, failed] of call.tools) {
    pen.fillStyle = failed ? colours.bad : colours["on-bar"];
    pen.fillRect(Math.round(picture.x(at)), y + 1, 2, tall - 2);
  }
}

function drawScores(picture, pen, call, x, w, y) {
  const colours = picture.paint();
  for (const [turn, , value] of call.scores) {
    const at = turn < 0 ? call.ended_s : call.spans[2 * turn + 1];
    if (at === undefined || at === null) continue;
    pen.fillStyle = value > 0 ? colours.good : colours.bad;
    pen.strokeStyle = colours.paper;
    pen.beginPath();
    pen.arc(Math.min(Math.max(picture.x(at), x + 5), Math.max(x + w - 5, x + 5)), y, 3.5, 0, 7);
    pen.fill();
    pen.stroke();
  }
}

// Color between those of the worst and the best reward; gray without a reward.
export function worthColour(colours, reward, range) {
  if (reward === null || !range) return colours["line-2"];
  const share = (reward - range[0]) / (range[1] - range[0]);
  return share >= 0.999
    ? colours.good
    : share <= 0.001
      ? colours.bad
      : `color-mix(in oklab, ${colours.good} ${Math.round(100 * share)}%, ${colours.bad})`;
}

// Nats between trainer and sampler that have the full colour.
export const LARGE_GAP = 0.5;

// The colour of a tone, paler towards 0; gray without a value.
export function shareColour(colours, tone, value, most) {
  if (value === null || !most) return colours["line-2"];
  const share = Math.min(1, Math.abs(value) / most);
  return `color-mix(in oklab, ${colours[tone]} ${Math.round(100 * share)}%, ${colours.line})`;
}

// From neutral to dark: the share of the largest value. The square root tells small ones apart.
export function measureColour(colours, value, most) {
  const share = Math.round(100 * shareOf(value, most));
  return `color-mix(in oklab, ${colours.link} ${share}%, ${colours["line-2"]})`;
}

export function shareOf(value, most) {
  return value && most ? Math.sqrt(Math.min(1, value / most)) : 0;
}

function drawLabel(pen, call, { x, y, w, tall, ink }) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, w - 4, tall);
  pen.clip();
  pen.font = "11px ui-monospace, monospace";
  pen.textBaseline = "middle";
  pen.fillStyle = ink;
  pen.fillText(
    `${call.id}  ${oneLine(call.telling || call.question, 80)}`,
    x + 5,
    y + tall / 2 + 0.5,
  );
  pen.restore();
}

export function drawSelected(picture, pen) {
  const colours = picture.paint();
  const frame = (index, colour, thick) => {
    const call = picture.run.calls[index];
    if (!call) return;
    const band = picture.bands[picture.lanes.bandOf(call)],
      [x, right] = picture.lanes.edges(index).map((edge) => picture.x(edge));
    const y = band.top + picture.lanes.of[index] * band.lane;
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.strokeRect(
      x - 1,
      y - 0.5,
      Math.max(right - x, 2) + 2,
      Math.max(Math.min(band.lane, band.most), 3) + 1,
    );
    pen.lineWidth = 1;
    return [x, y, Math.min(band.lane, band.most)];
  };
  let at = picture.selected,
    below = null;
  for (let number = 0; at >= 0 && picture.run.calls[at] && number < 50; number++) {
    const place = frame(at, number ? colours["ink-2"] : colours.ink, number ? 1 : 2);
    if (below && place) {
      pen.beginPath();
      pen.moveTo(below[0] - 1, below[1]);
      pen.lineTo(below[0] - 1, place[1] + place[2]);
      pen.stroke();
    }
    below = place;
    at = picture.run.calls[at].parent;
  }
  if (picture.hovered >= 0 && picture.hovered !== picture.selected)
    frame(picture.hovered, colours["ink-2"], 1);
}
