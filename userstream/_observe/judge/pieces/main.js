/* Puts the parts together: one state, and what changes it. */

function main() {
  const byId = (id) => document.getElementById(id);
  const model = readModel(JSON.parse(byId("data").textContent));
  const view = makeView(model);
  const canvas = byId("canvas");
  const state = {
    view, marks: null, selected: null, hovered: null, race: null, palette: readPalette(canvas),
  };
  const redraw = painter(canvas, state);
  const actions = makeActions(state, byId, redraw);

  fillSummary(byId("summary"), model);
  fillLegend(byId("legend"));
  byId("note").textContent = noteText(model);
  fillFound(byId("found"), model, actions.chooseRace);
  nameScale(byId("scale"), view);
  followSize(canvas, state, redraw);
  followColours(canvas, state, redraw);
  followButtons(byId, state, redraw);
  followSearch(byId, actions);
  followPointer(canvas, byId("tip"), state, actions, redraw);
  followKeys(canvas, byId, state, actions, redraw);
}

/* Returns what asks for a new picture, of which there is one a frame at most. */
function painter(canvas, state) {
  const context = canvas.getContext("2d");
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      const dense = window.devicePixelRatio || 1;
      context.setTransform(dense, 0, 0, dense, 0, 0);
      paint(context, state);
    });
  };
}

function makeActions(state, byId, redraw) {
  const { view } = state;
  const { model } = view;
  let matches = [];
  const actions = {
    select(entry) {
      state.selected = entry;
      fillDetail(byId("detail"), model, entry, actions);
      if (entry) bringIn(view, entry);
      redraw();
    },
    chooseRace(race) {
      state.race?.card.classList.remove("shown");
      state.race = race;
      race?.card.classList.add("shown");
      const ends = race ? race.ends.filter((end) => end !== null) : [];
      if (ends.length) showAround(view, ends);
      redraw();
    },
    search(query) {
      byId("search").value = query;
      const found = search(model, query);
      matches = found ?? [];
      state.marks = found && new Set(found);
      byId("matches").textContent = found ? found.length.toLocaleString("en") : "";
      redraw();
    },
    nextMatch(step) {
      if (!matches.length) return;
      const now = state.selected?.index ?? (step > 0 ? -1 : Infinity);
      const next = step > 0
        ? matches.find((index) => index > now) ?? matches[0]
        : matches.findLast((index) => index < now) ?? matches.at(-1);
      actions.select(model.entries[next]);
    },
    nextRace(step) {
      const { races } = model;
      if (!races.length) return;
      const at = state.race ? races.indexOf(state.race) + step : 0;
      actions.chooseRace(races[(at + races.length) % races.length]);
      state.race.card.scrollIntoView({ block: "nearest" });
    },
  };
  return actions;
}

/* Moves the view if an entry is not in it. */
function bringIn(view, entry) {
  const [begin, end] = spanOf(view, entry).map((place) => toPixel(view, place));
  if (end - begin < 3 || begin < gutter(view) || end > view.width) showAround(view, [entry.index]);
  else showRows(view, [entry.index]);
}

/* ---- what changes it ------------------------------------------------------------------------ */

function followSize(canvas, state, redraw) {
  const { view } = state;
  new ResizeObserver(([{ contentRect }]) => {
    const dense = window.devicePixelRatio || 1;
    canvas.width = Math.round(contentRect.width * dense);
    canvas.height = Math.round(contentRect.height * dense);
    const first = !view.width;
    view.width = contentRect.width;
    view.height = contentRect.height;
    if (first) showFirst(view);
    else clamp(view);
    redraw();
  }).observe(canvas.parentElement);
}

function followColours(canvas, state, redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    state.palette = readPalette(canvas);
    redraw();
  });
}

function nameScale(button, view) {
  button.textContent = view.scale === "order" ? "By host time" : "By order";
}

function changeScale(state) {
  const { view } = state;
  const middle = (gutter(view) + view.width) / 2;
  const near = nearest(view, toPlace(view, middle));
  view.scale = view.scale === "order" ? "time" : "order";
  const shown = state.race?.ends.filter((end) => end !== null) ?? [];
  if (shown.length) showAround(view, shown);
  else if (near) showAround(view, [near.index]);
  else fit(view);
}

function nearest(view, place) {
  let found = null;
  let least = Infinity;
  for (const entry of view.model.entries) {
    const distance = Math.abs(spanOf(view, entry)[0] - place);
    if (distance < least) [least, found] = [distance, entry];
  }
  return found;
}

function followButtons(byId, state, redraw) {
  const { view } = state;
  const middle = () => (gutter(view) + view.width) / 2;
  const does = {
    out: () => zoom(view, 1.6, middle()),
    in: () => zoom(view, 1 / 1.6, middle()),
    all: () => fit(view),
    scale: () => {
      changeScale(state);
      nameScale(byId("scale"), view);
    },
  };
  for (const [id, act] of Object.entries(does)) {
    byId(id).addEventListener("click", () => {
      act();
      redraw();
    });
  }
}

function followSearch(byId, actions) {
  const input = byId("search");
  input.addEventListener("input", () => actions.search(input.value));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") actions.nextMatch(event.shiftKey ? -1 : 1);
  });
}

function followPointer(canvas, tip, state, actions, redraw) {
  const { view } = state;
  const down = new Map(); // pointers, and where they are
  let moved = 0;

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, [event.offsetX, event.offsetY]);
    moved = 0;
    if (event.offsetY < OVERVIEW) jump(view, event.offsetX);
    redraw();
  });
  canvas.addEventListener("pointermove", (event) => {
    const to = [event.offsetX, event.offsetY];
    if (down.has(event.pointerId)) {
      moved += drag(view, down, event.pointerId, to);
      fillTip(tip, view.model, null);
    } else {
      state.hovered = entryAt(view, ...to);
      fillTip(tip, view.model, state.hovered, ...to);
    }
    redraw();
  });
  const up = (event) => {
    if (!down.delete(event.pointerId) || event.type !== "pointerup") return;
    if (moved < 4 && event.offsetY > TOP)
      actions.select(entryAt(view, event.offsetX, event.offsetY));
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => {
    state.hovered = null;
    fillTip(tip, view.model, null);
    redraw();
  });
  canvas.addEventListener("wheel", (event) => turn(view, event, redraw), { passive: false });
}

/* One pointer pans, two zoom. Returns how far it was. */
function drag(view, down, id, to) {
  const from = down.get(id);
  const other = [...down].find(([each]) => each !== id)?.[1];
  down.set(id, to);
  const [across, along] = [to[0] - from[0], to[1] - from[1]];
  if (to[1] < OVERVIEW && from[1] < OVERVIEW) jump(view, to[0]);
  else if (other) zoom(view, apart(from, other) / apart(to, other), (to[0] + other[0]) / 2);
  else pan(view, -across, -along);
  return Math.abs(across) + Math.abs(along);
}

function apart(one, other) {
  return Math.max(1, Math.abs(one[0] - other[0]));
}

function jump(view, x) {
  const [begin, end] = extent(view);
  const place = begin + (x / view.width) * (end - begin);
  view.left = place - ((view.width - gutter(view)) * view.perPixel) / 2;
  clamp(view);
}

/* The wheel zooms; sideways, or with the shift key, it pans. */
function turn(view, event, redraw) {
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : 1;
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (event.shiftKey || sideways) pan(view, (sideways ? event.deltaX : event.deltaY) * lines, 0);
  else zoom(view, Math.exp(event.deltaY * lines * 0.002), event.offsetX);
  redraw();
}

function followKeys(canvas, byId, state, actions, redraw) {
  const { view } = state;
  const middle = () => (gutter(view) + view.width) / 2;
  const does = {
    ArrowLeft: () => pan(view, -80, 0),
    ArrowRight: () => pan(view, 80, 0),
    ArrowUp: () => pan(view, 0, -HEIGHTS.stream),
    ArrowDown: () => pan(view, 0, HEIGHTS.stream),
    "+": () => zoom(view, 1 / 1.6, middle()),
    "-": () => zoom(view, 1.6, middle()),
    0: () => fit(view),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!does[event.key]) return;
    event.preventDefault();
    does[event.key]();
    redraw();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target === byId("search") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      event.preventDefault();
      byId("search").focus();
    } else if (event.key === "n") actions.nextRace(1);
    else if (event.key === "p") actions.nextRace(-1);
    else if (event.key === "Escape") actions.select(null);
  });
}

if (typeof document !== "undefined") main();
