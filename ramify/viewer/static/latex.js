// LaTeX as MathML elements, made by the vendored library node by node; null for what it cannot
// read.

import { optional } from "./api.js";
import { h } from "./dom.js";
import temml from "./vendor/temml.js";

function drawMath(source, displayMode) {
  const place = h("span");
  try {
    temml.render(source, place, { displayMode, throwOnError: true, trust: false, maxExpand: 200 });
  } catch {
    return null;
  }
  return place.firstChild;
}

optional.latex = drawMath;
