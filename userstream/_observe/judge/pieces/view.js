/* Which part of the timeline is seen, and where: pixels are those of the style sheet.
 *
 * Across, a place is the number of an operation ("order") or nanoseconds ("time"). */

const OVERVIEW = 14;
const AXIS = 24;
const TOP = OVERVIEW + AXIS;
const HEIGHTS = { process: 26, thread: 30, stream: 42 };
const MOST_STRETCH = 2.2; // of rows that are few
const NARROW = 560;

function makeView(model) {
  return { model, scale: "order", width: 0, height: 0, left: 0, perPixel: 1, top: 0 };
}

/* The height in which all rows are seen, for a page that scrolls as a whole. */
function fullHeight(view) {
  return view.model.rows.reduce((sum, { kind }) => sum + HEIGHTS[kind], TOP + 8);
}

function gutter(view) {
  return view.width < NARROW ? 92 : 188;
}

function extent(view) {
  const { entries, lasted } = view.model;
  return [0, Math.max(1, view.scale === "order" ? entries.length : lasted)];
}

function spanOf(view, entry) {
  return view.scale === "order"
    ? [entry.index, entry.index + 0.86]
    : [entry.began, entry.began + entry.took];
}

function toPixel(view, place) {
  return gutter(view) + (place - view.left) / view.perPixel;
}

function toPlace(view, pixel) {
  return view.left + (pixel - gutter(view)) * view.perPixel;
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* Where each row begins, and where the last one ends. Streams that are few have room for edges. */
function rowTops(view) {
  const { rows } = view.model;
  const sum = (kind) => rows.filter((row) => row.kind === kind).length * HEIGHTS[kind];
  const room = view.height - TOP - sum("process") - sum("thread") - 40;
  const stretch = Math.max(1, Math.min(MOST_STRETCH, room / Math.max(1, sum("stream"))));
  const tops = [TOP - view.top];
  for (const { kind } of rows)
    tops.push(tops.at(-1) + Math.round(HEIGHTS[kind] * (kind === "stream" ? stretch : 1)));
  return tops;
}

/* ---- moving --------------------------------------------------------------------------------- */

function fit(view) {
  const [begin, end] = extent(view);
  show(view, begin, end);
}

/* Shows these places, with some room beside them. */
function show(view, begin, end) {
  const room = Math.max(1, view.width - gutter(view));
  const margin = (end - begin) * 0.03;
  view.perPixel = (end - begin + 2 * margin) / room;
  view.left = begin - margin;
  clamp(view);
}

function zoom(view, factor, pixel) {
  const place = toPlace(view, pixel);
  view.perPixel *= factor;
  clampScale(view);
  view.left = place - (pixel - gutter(view)) * view.perPixel;
  clamp(view);
}

function pan(view, across, down) {
  view.left += across * view.perPixel;
  view.top += down;
  clamp(view);
}

function clampScale(view) {
  const room = Math.max(1, view.width - gutter(view));
  const [begin, end] = extent(view);
  const least = view.scale === "order" ? 1 / 160 : 1;
  const most = Math.max(least, ((end - begin) * 1.2) / room);
  view.perPixel = Math.max(least, Math.min(view.perPixel, most));
}

/* Half of the view may be empty at most. */
function clamp(view) {
  clampScale(view);
  const room = (view.width - gutter(view)) * view.perPixel;
  const [begin, end] = extent(view);
  view.left = Math.max(begin - room / 2, Math.min(view.left, end - room / 2));
  const tall = rowTops(view).at(-1) + view.top + 8;
  view.top = Math.max(0, Math.min(view.top, tall - view.height));
}

/* Changes what lies across. The entries in view stay there, and one of them under its pixel: the
 * one that is selected, or an end of the race that is shown, or the one in the middle. */
function changeScale(view, preferred) {
  const seen = visible(view);
  const middle = toPlace(view, (gutter(view) + view.width) / 2);
  const kept = preferred.find((entry) => seen.includes(entry)) ?? nearest(view, seen, middle);
  const pixel = kept && toPixel(view, spanOf(view, kept)[0]);
  view.scale = view.scale === "order" ? "time" : "order";
  if (!kept) return fit(view);
  const spans = seen.map((entry) => spanOf(view, entry));
  const begin = spans.reduce((least, span) => Math.min(least, span[0]), Infinity);
  const end = spans.reduce((most, span) => Math.max(most, span[1]), -Infinity);
  view.perPixel = (end - begin) / Math.max(1, view.width - gutter(view));
  clampScale(view);
  view.left = spanOf(view, kept)[0] - (pixel - gutter(view)) * view.perPixel;
  clamp(view);
}

function nearest(view, entries, place) {
  let found = null;
  let least = Infinity;
  for (const entry of entries) {
    const distance = Math.abs(spanOf(view, entry)[0] - place);
    if (distance < least) [least, found] = [distance, entry];
  }
  return found;
}

/* The places to begin with: all if they are few, else those around the first race. */
function showFirst(view) {
  const { entries, races } = view.model;
  const race = races.find(({ ends }) => ends[1] !== null);
  if (entries.length <= 300 || !race) fit(view);
  else showAround(view, race.ends.filter((end) => end !== null));
}

/* Shows some entries together, with their neighbours. */
function showAround(view, indexes) {
  const spans = indexes.map((index) => spanOf(view, view.model.entries[index]));
  const begin = Math.min(...spans.map((span) => span[0]));
  const end = Math.max(...spans.map((span) => span[1]));
  const least = view.scale === "order" ? 9 : 20000;
  const margin = Math.max((end - begin) * 0.35, (least - (end - begin)) / 2);
  show(view, begin - margin, end + margin);
  showRows(view, indexes);
}

function showRows(view, indexes) {
  const tops = rowTops(view);
  for (const index of indexes) {
    const { lane, thread } = view.model.entries[index];
    const row = lane < 0 ? thread : lane;
    view.top += Math.max(0, tops[row + 1] - view.height) + Math.min(0, tops[row] - TOP);
    clamp(view);
  }
}

/* The entry before or behind one on its row, or the first in view if there is none. */
function neighbour(view, entry, step) {
  if (!entry) return visible(view)[0] ?? null;
  const { entries } = view.model;
  const row = entry.lane < 0 ? entry.thread : entry.lane;
  for (let at = entry.index + step; at >= 0 && at < entries.length; at += step) {
    const other = entries[at];
    if (other.lane === row || (entry.lane < 0 && other.thread === row)) return other;
  }
  return entry;
}

/* ---- what is there -------------------------------------------------------------------------- */

/* The entries in the view, in their order. */
function visible(view) {
  const { entries } = view.model;
  const begin = toPlace(view, gutter(view));
  const end = toPlace(view, view.width);
  if (view.scale === "order")
    return entries.slice(Math.max(0, Math.floor(begin)), Math.max(0, Math.ceil(end)));
  return entries.filter((entry) => entry.began <= end && entry.began + entry.took >= begin);
}

function entryAt(view, x, y) {
  if (x < gutter(view) || y < TOP) return null;
  const tops = rowTops(view);
  const row = tops.findLastIndex((top) => top <= y);
  let found = null;
  let nearest = 4; // pixels
  for (const entry of view.model.entries) {
    if (entry.lane !== row && entry.thread !== row) continue;
    const [begin, end] = spanOf(view, entry).map((place) => toPixel(view, place));
    const distance = Math.max(begin - x, x - end, 0);
    if (distance < nearest) {
      nearest = distance;
      found = entry;
      if (!distance && view.scale === "order") break;
    }
  }
  return found;
}
