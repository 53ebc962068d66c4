/* Paints the timeline: what is out of the view, or behind a pixel that is taken, is left out. */

const COLOURS = [
  "page", "panel", "line", "text", "muted", "accent", "race", "kernel", "copy", "fill", "graph",
  "memory", "signal", "call", "wait", "on-bar", "edge",
];
const SMALL = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const STRONG = `600 ${SMALL}`;
const NAMED = 34; // pixels of a bar that has its name in it
const MOST_EDGED = 1200; // operations in the view whose edges can be told apart

function readPalette(element) {
  const style = getComputedStyle(element);
  return Object.fromEntries(
    COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
  );
}

/* `state`: view, palette, marks (a set of entries, or null), selected, hovered, race. */
function paint(context, state) {
  const { view, palette } = state;
  const tops = rowTops(view);
  context.fillStyle = palette.page;
  context.fillRect(0, 0, view.width, view.height);
  paintRows(context, state, tops);
  context.save();
  context.beginPath();
  context.rect(gutter(view), TOP, view.width - gutter(view), view.height - TOP);
  context.clip();
  paintGrid(context, state);
  const seen = visible(view);
  paintCalls(context, state, tops, seen);
  paintBars(context, state, tops, seen);
  paintEdges(context, state, tops, seen);
  paintRaces(context, state, tops);
  context.restore();
  paintLabels(context, state, tops);
  paintAxis(context, state);
  paintOverview(context, state);
}

/* ---- rows and axis -------------------------------------------------------------------------- */

function paintRows(context, { view, palette }, tops) {
  view.model.rows.forEach((row, at) => {
    if (row.kind !== "stream") {
      context.fillStyle = row.kind === "thread" ? palette.panel : palette.line;
      context.fillRect(0, tops[at], view.width, tops[at + 1] - tops[at]);
    }
    context.fillStyle = palette.line;
    context.fillRect(0, tops[at + 1] - 1, view.width, 1);
  });
}

function paintLabels(context, state, tops) {
  const { view, palette } = state;
  context.fillStyle = palette.line;
  context.fillRect(gutter(view) - 1, TOP, 1, view.height - TOP);
  context.save();
  context.beginPath();
  context.rect(0, TOP, gutter(view) - 1, view.height - TOP);
  context.clip();
  view.model.rows.forEach((row, at) => {
    if (row.kind !== "process") paintLabel(context, state, row, (tops[at] + tops[at + 1]) / 2);
  });
  context.restore();
  context.font = STRONG;
  context.textBaseline = "middle";
  context.fillStyle = palette.text;
  view.model.rows.forEach((row, at) => {
    const middle = (tops[at] + tops[at + 1]) / 2;
    if (row.kind === "process" && middle > TOP)
      context.fillText(fitted(context, row.name, view.width - 20), 10, middle);
  });
}

function paintLabel(context, { view, palette }, row, middle) {
  const room = gutter(view) - 20;
  const [name, rest] = labelOf(row, view.width < NARROW);
  context.textBaseline = "middle";
  context.font = row.kind === "thread" ? SMALL : STRONG;
  context.fillStyle = row.kind === "thread" ? palette.muted : palette.text;
  context.fillText(fitted(context, name, room), 10, rest ? middle - 7 : middle);
  if (!rest) return;
  context.font = SMALL;
  context.fillStyle = palette.muted;
  context.fillText(fitted(context, rest, room), 10, middle + 8);
}

/* "user stream 'x' of device 0", and where it was created, in two lines. */
function labelOf({ name, origin }, isShort) {
  const [, first, device] = /^(.*?)(?: of (device \d+))?$/.exec(name);
  const where = /[^ ]+:\d+/.exec(origin);
  const rest = [where?.[0], isShort && where ? null : device].filter(Boolean).join(", ");
  return [(isShort && /^user stream '(.*)'$/.exec(first)?.[1]) || first, rest];
}

/* A text that is too wide loses its middle: streams differ in the end of their handles. */
function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  for (let kept = text.length - 1; kept > 2; kept--) {
    const end = Math.floor(kept / 2);
    const shorter = `${text.slice(0, kept - end)}…${text.slice(text.length - end)}`;
    if (context.measureText(shorter).width <= room) return shorter;
  }
  return "";
}

/* Round places with room for their texts, which all differ. */
function ticks(view) {
  const [begin, end] = [toPlace(view, gutter(view)), toPlace(view, view.width)];
  let [step, found] = [0, []];
  for (let room = 80; ; room = widest(found) + 12) {
    const wider = roundStep(room * view.perPixel, view.scale);
    if (wider <= step) return found;
    step = wider;
    const shift = view.scale === "order" ? view.model.first % step : 0;
    const places = [];
    for (let at = Math.ceil((begin + shift) / step) * step - shift; at <= end; at += step)
      places.push(at);
    found = places.map((at) => ({ at, text: tickText(view, at, step, end) }));
  }
}

function roundStep(least, scale) {
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= least);
  return scale === "order" ? Math.max(1, step) : step;
}

function widest(found) {
  return 6.5 * found.reduce((most, { text }) => Math.max(most, text.length), 0); // pixels
}

/* Times have the unit of the last one, and as many digits as the step needs. */
function tickText(view, at, step, end) {
  if (view.scale === "order") return Math.round(at + view.model.first).toLocaleString("en");
  if (!Math.round(at)) return "0";
  const [size, unit] = unitOf(end);
  const digits = Math.max(0, Math.ceil(Math.log10(size / step)));
  return `${(at / size).toFixed(digits)} ${unit}`;
}

function paintGrid(context, { view, palette }) {
  context.fillStyle = palette.line;
  context.globalAlpha = 0.5;
  for (const { at } of ticks(view))
    context.fillRect(Math.round(toPixel(view, at)), TOP, 1, view.height);
  context.globalAlpha = 1;
}

function paintAxis(context, { view, palette }) {
  context.fillStyle = palette.page;
  context.fillRect(0, OVERVIEW, view.width, AXIS);
  context.fillStyle = palette.line;
  context.fillRect(0, TOP - 1, view.width, 1);
  context.font = SMALL;
  context.textBaseline = "middle";
  context.fillStyle = palette.muted;
  const middle = OVERVIEW + AXIS / 2;
  context.fillText(view.scale === "order" ? "operation" : "host time", 10, middle);
  for (const { at, text } of ticks(view)) {
    const x = toPixel(view, at) + 4;
    if (at >= 0 && x >= gutter(view) && x + context.measureText(text).width < view.width)
      context.fillText(text, x, middle);
  }
}

/* The whole timeline, with where the view is and where the races are. */
function paintOverview(context, state) {
  const { view, palette } = state;
  const [begin, end] = extent(view);
  const across = (place) => ((place - begin) / (end - begin)) * view.width;
  context.fillStyle = palette.panel;
  context.fillRect(0, 0, view.width, OVERVIEW);
  const left = Math.max(0, across(view.left));
  const right = Math.min(view.width, across(toPlace(view, view.width)));
  context.fillStyle = palette.line;
  context.fillRect(left, 0, Math.max(3, right - left), OVERVIEW);
  let painted = -1;
  for (const index of state.marks ?? []) {
    const x = across(spanOf(view, view.model.entries[index])[0]);
    if (x < painted) continue;
    overviewTick(context, x, palette.accent, 6);
    painted = x + 1;
  }
  for (const race of view.model.races) {
    for (const index of race.ends.filter((each) => each !== null))
      overviewTick(context, across(spanOf(view, view.model.entries[index])[0]), palette.race, 0);
  }
}

function overviewTick(context, x, colour, top) {
  context.fillStyle = colour;
  context.fillRect(Math.round(x) - 1, top, 2, OVERVIEW - top);
}

/* ---- bars ----------------------------------------------------------------------------------- */

function boxOf(view, entry, row, tops) {
  const [begin, end] = spanOf(view, entry).map((place) => toPixel(view, place));
  const height = view.model.rows[row].kind === "thread" ? 14 : 26;
  const y = Math.round((tops[row] + tops[row + 1] - height) / 2);
  return { x: begin, y, width: Math.max(end - begin, 2), height };
}

function isDimmed(state, entry) {
  return state.marks !== null && !state.marks.has(entry.index);
}

/* Tells whether the pixels of an entry are painted already, by one that looks like it; takes them
 * otherwise. */
function isBehind(state, entry, row, taken) {
  const key = 4 * row + 2 * isDimmed(state, entry) + entry.waited;
  const [begin, end] = spanOf(state.view, entry);
  if (toPixel(state.view, end) < (taken.get(key) ?? -1)) return true;
  taken.set(key, toPixel(state.view, begin) + 1.5);
  return false;
}

/* In the rows of the host: who queued it, and where it waited. */
function paintCalls(context, state, tops, seen) {
  const taken = new Map();
  for (const entry of seen) {
    if (isBehind(state, entry, entry.thread, taken)) continue;
    const box = boxOf(state.view, entry, entry.thread, tops);
    context.globalAlpha = isDimmed(state, entry) ? 0.25 : 1;
    if (entry.waited) paintWait(context, state.palette, box);
    else {
      context.fillStyle = state.palette.call;
      context.fillRect(box.x, box.y + box.height / 2 - 2, box.width, 4);
    }
    if (entry.lane < 0) paintOutline(context, state, entry, box);
  }
  context.globalAlpha = 1;
}

function paintWait(context, palette, box) {
  const { x, y, width, height } = box;
  context.save();
  context.strokeStyle = palette.wait;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1, 1), height - 1);
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  const first = Math.max(x - height, -height); // a long wait may begin far outside
  for (let at = first - ((first - x) % 5); at < Math.min(x + width, 8192); at += 5) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

function paintBars(context, state, tops, seen) {
  const taken = new Map();
  for (const entry of seen) {
    if (entry.lane < 0 || isBehind(state, entry, entry.lane, taken)) continue;
    const box = boxOf(state.view, entry, entry.lane, tops);
    if (box.y + box.height >= TOP && box.y <= state.view.height)
      paintBar(context, state, entry, box);
  }
  context.globalAlpha = 1;
}

function paintBar(context, state, entry, box) {
  context.globalAlpha = isDimmed(state, entry) ? 0.2 : 1;
  context.fillStyle = context.strokeStyle = state.palette[entry.kind];
  roundBox(context, box, 3);
  if (entry.captured) {
    context.setLineDash([3, 2]);
    context.stroke();
    context.setLineDash([]);
  } else context.fill();
  if (box.width >= NAMED && !isDimmed(state, entry)) paintName(context, state, entry, box);
  paintOutline(context, state, entry, box);
}

function roundBox(context, { x, y, width, height }, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, Math.min(radius, width / 2));
}

function paintName(context, { view, palette }, entry, box) {
  const begin = Math.max(box.x, gutter(view)) + 5;
  const room = box.x + box.width - 5 - begin;
  context.font = SMALL;
  context.textBaseline = "middle";
  context.fillStyle = entry.captured ? palette.text : palette["on-bar"];
  const name = entry.name.replace(/^cu(?=[A-Z])/, "").replace(/_v\d+$/, "");
  if (room > 16) context.fillText(cut(context, name, room), begin, box.y + box.height / 2 + 0.5);
}

/* A name that is too wide loses its end. */
function cut(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let kept = text.length - 1;
  while (kept > 0 && context.measureText(`${text.slice(0, kept)}…`).width > room) kept--;
  return kept > 1 ? `${text.slice(0, kept)}…` : "";
}

function paintOutline(context, { selected, hovered, palette }, entry, box) {
  if (entry !== selected && entry !== hovered) return;
  context.strokeStyle = palette.text;
  context.lineWidth = entry === selected ? 2 : 1;
  roundBox(context, box, 3);
  context.stroke();
  context.lineWidth = 1;
}

/* ---- edges ---------------------------------------------------------------------------------- */

function paintEdges(context, state, tops, seen) {
  const { view } = state;
  const all = seen.length <= MOST_EDGED;
  if (!all && state.selected === null) return;
  for (const entry of seen) {
    for (const source of entry.after) {
      const other = view.model.entries[source];
      const chosen = entry === state.selected || other === state.selected;
      if (chosen || all) paintEdge(context, state, tops, other, entry, chosen);
    }
  }
}

function paintEdge(context, state, tops, from, to, chosen) {
  const [one, other] = [from, to].map((entry) => ownBox(state.view, entry, tops));
  const down = one.y < other.y;
  const x0 = one.x + one.width - Math.min(one.width / 4, 8);
  const x1 = other.x + Math.min(other.width / 4, 8);
  const y0 = down ? one.y + one.height : one.y;
  const y1 = down ? other.y : other.y + other.height;
  context.globalAlpha = state.marks !== null && !chosen ? 0.2 : 1;
  context.strokeStyle = context.fillStyle = chosen ? state.palette.accent : state.palette.edge;
  context.lineWidth = chosen ? 2 : 1.25;
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1 + (down ? -5 : 5));
  context.stroke();
  paintHead(context, x1, y1, down ? -7 : 7);
  context.globalAlpha = 1;
  context.lineWidth = 1;
}

/* The box of an operation on its stream, of a wait on its thread. */
function ownBox(view, entry, tops) {
  return boxOf(view, entry, entry.lane < 0 ? entry.thread : entry.lane, tops);
}

function paintHead(context, x, y, back) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - 3.5, y + back);
  context.lineTo(x + 3.5, y + back);
  context.fill();
}

/* ---- races ---------------------------------------------------------------------------------- */

function paintRaces(context, state, tops) {
  const taken = [];
  const { races } = state.view.model;
  const sorted = [...races].sort((one, other) => (other === state.race) - (one === state.race));
  for (const race of sorted) paintRace(context, state, tops, race, taken);
}

function paintRace(context, state, tops, race, taken) {
  const { view, palette } = state;
  const sides = race.ends.filter((end) => end !== null).map((end) => view.model.entries[end]);
  const boxes = sides.map((entry) => ownBox(view, entry, tops));
  if (!boxes.some((box) => box.x <= view.width && box.x + box.width >= gutter(view))) return;
  context.strokeStyle = palette.race;
  context.lineWidth = race === state.race ? 3 : 2;
  for (const box of boxes) {
    roundBox(context, box, 3);
    context.stroke();
  }
  const at = boxes.length === 2 ? paintConflict(context, race, boxes) : besideBox(boxes[0]);
  context.lineWidth = 1;
  paintRaceText(context, state, race, at, taken);
}

/* The line between the two; returns its middle. */
function paintConflict(context, race, [one, other]) {
  const [left, right] = one.x <= other.x ? [one, other] : [other, one];
  const x0 = left.x + left.width / 2;
  const x1 = right.x + right.width / 2;
  const down = left.y < right.y;
  const y0 = left.y === right.y ? left.y : down ? left.y + left.height : left.y;
  const y1 = left.y === right.y ? right.y : down ? right.y : right.y + right.height;
  const lift = left.y === right.y ? -24 : 0;
  const middle = (y0 + y1) / 2 + lift;
  context.setLineDash(race.possible ? [3, 3] : []);
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0, middle, x1, middle, x1, y1);
  context.stroke();
  context.setLineDash([]);
  return [(x0 + x1) / 2, middle];
}

function besideBox(box) {
  return [box.x + box.width / 2, box.y + box.height + 12];
}

function raceText(race) {
  const size = race.nbytes > 1 ? `, ${bytes(race.nbytes)}` : ""; // of a kernel's, only where it is
  return `${race.possible ? "possible " : ""}${race.kind}${size}`;
}

/* Its text, where there is room: that of the race that was chosen comes first. */
function paintRaceText(context, { view, palette }, race, [x, y], taken) {
  context.font = STRONG;
  context.textBaseline = "middle";
  const width = context.measureText(raceText(race)).width + 14;
  const left = Math.max(gutter(view) + 4, Math.min(x - width / 2, view.width - width - 4));
  const top = Math.max(TOP + 2, Math.min(y - 9, view.height - 20));
  const box = { x: left, y: top, width, height: 18 };
  if (taken.some((each) => overlap(each, box))) return;
  taken.push(box);
  context.fillStyle = palette.race;
  roundBox(context, box, 9);
  context.fill();
  context.fillStyle = palette.page;
  context.fillText(raceText(race), left + 7, top + 9.5);
}

function overlap(one, other) {
  return one.x < other.x + other.width && other.x < one.x + one.width &&
    one.y < other.y + other.height && other.y < one.y + one.height;
}
