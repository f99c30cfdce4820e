// The code of a call that differs from its siblings, word by word against that of a typical one.

import { get, optional } from "./api.js";
import { differenceInOne } from "./diff.js";
import { fill, h } from "./dom.js";
import { many } from "./format.js";

// Draws into `place`. `view` is the Transcript that shows the call.
async function showSiblingCode(place, view, id) {
  const found = await get("/api/siblings", { key: view.run.head.key, id });
  if (view.id !== id) return;
  const sibling = view.run.calls[view.run.indexOf(found.sibling)];
  place.hidden = !sibling;
  if (!sibling) return;
  const link = h(
    "a",
    { href: view.actions.address(sibling.id, null) },
    sibling.telling || `call ${sibling.id}`,
  );
  const shared =
    found.num_siblings > 1
      ? ` (the same in ${found.shared_by} of ${found.num_siblings} siblings)`
      : "";
  if (found.cells.every(([own, other]) => own === other))
    return void fill(
      place,
      h(
        "p.note",
        null,
        "Its code is the same as that of ",
        link,
        shared,
        "; compare what each of them was given.",
      ),
    );
  const equal = found.cells.filter(([own, other]) => own === other).length;
  fill(
    place,
    h(
      "h3",
      null,
      "its code compared with that of ",
      link,
      h("span.quiet", null, shared),
      h("span.legend-words", null, h("ins", null, "only here"), " ", h("del", null, "only there")),
    ),
    found.cells
      .filter(([own, other]) => own !== other)
      .map(([own, other]) => differenceInOne(other ?? "", own ?? "")),
    equal
      ? h("p.quiet", null, `${many(equal, "other cell")} ${equal === 1 ? "is" : "are"} the same`)
      : null,
  );
}

optional.sibling_code = showSiblingCode;
