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
  const actions = makeActions(canvas, state, byId, redraw);

  fillSummary(byId("summary"), model);
  fillLegend(byId("legend"));
  byId("note").textContent = noteText(model);
  fillFound(byId("found"), model, actions);
  nameScale(byId("scale"), view);
  followSize(canvas, state, redraw);
  followColours(canvas, state, redraw);
  followPrinting(canvas, state);
  followButtons(byId, state, redraw);
  followSearch(byId, actions);
  followPointer(canvas, byId("tip"), state, actions, redraw);
  followKeys(canvas, byId, state, actions, redraw);
}

/* Returns what asks for a new picture, of which there is one a frame at most. */
function painter(canvas, state) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      paintNow(canvas, state);
    });
  };
}

function paintNow(canvas, state) {
  const context = canvas.getContext("2d");
  const dense = window.devicePixelRatio || 1;
  context.setTransform(dense, 0, 0, dense, 0, 0);
  paint(context, state);
}

function makeActions(canvas, state, byId, redraw) {
  const { view } = state;
  const { model } = view;
  let matches = null;
  const tellMatches = () => {
    byId("matches").textContent = matchText(matches, state.selected);
  };
  const actions = {
    select(entry) {
      state.selected = entry;
      fillDetail(byId("detail"), model, entry, actions);
      tellMatches();
      if (entry) {
        bringIn(view, entry);
        uncover(canvas, byId("detail"), view, entry);
      }
      redraw();
    },
    chooseRace(race) {
      state.race?.card.classList.remove("shown");
      state.race = race;
      race?.card.classList.add("shown");
      canvas.parentElement.scrollIntoView({ block: "nearest" });
      const ends = race ? race.ends.filter((end) => end !== null) : [];
      if (ends.length) showAround(view, ends);
      redraw();
    },
    search(query) {
      byId("search").value = query;
      matches = search(model, query);
      state.marks = matches && new Set(matches);
      tellMatches();
      redraw();
    },
    nextMatch(step) {
      if (!matches?.length) return;
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
      const race = races[(at + races.length) % races.length];
      race.card.scrollIntoView({ block: "nearest" });
      actions.chooseRace(race);
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

/* Scrolls the page, if the row of an entry is not seen above the details that lie over its end. */
function uncover(canvas, detail, view, { lane, thread }) {
  if (getComputedStyle(detail).position !== "fixed") return;
  const tops = rowTops(view).map((top) => canvas.getBoundingClientRect().top + top);
  const row = lane < 0 ? thread : lane;
  const room = detail.getBoundingClientRect().top;
  if (tops[row + 1] > room) scrollBy(0, tops[row + 1] - room + 8);
  else if (tops[row] < 0) scrollBy(0, tops[row] - 8);
}

/* ---- what changes it ------------------------------------------------------------------------ */

function followSize(canvas, state, redraw) {
  const { view } = state;
  const narrow = matchMedia("screen and (max-width: 820px)"); // the page scrolls as a whole
  const fitRows = () => {
    canvas.parentElement.style.height = narrow.matches ? `${fullHeight(view)}px` : "";
  };
  narrow.addEventListener("change", fitRows);
  fitRows();
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

/* Paper is light, whatever the screen is. */
function followPrinting(canvas, state) {
  const repaint = (isPrinting) => {
    document.documentElement.classList.toggle("paper", isPrinting);
    state.palette = readPalette(canvas);
    paintNow(canvas, state);
  };
  addEventListener("beforeprint", () => repaint(true));
  addEventListener("afterprint", () => repaint(false));
}

function nameScale(button, view) {
  button.textContent = view.scale === "order" ? "By host time" : "By order";
}

/* What stays where it is while the scale changes, if it is in view. */
function preferred({ view, selected, race }) {
  const ends = race?.ends.filter((end) => end !== null) ?? [];
  return [...(selected ? [selected] : []), ...ends.map((end) => view.model.entries[end])];
}

function followButtons(byId, state, redraw) {
  const { view } = state;
  const middle = () => (gutter(view) + view.width) / 2;
  const does = {
    out: () => zoom(view, 1.6, middle()),
    in: () => zoom(view, 1 / 1.6, middle()),
    all: () => fit(view),
    scale: () => {
      changeScale(view, preferred(state));
      nameScale(byId("scale"), view);
    },
    help: () => byId("keys").showModal(),
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

/* The wheel zooms; sideways, or with the shift key, it pans. A page that scrolls as a whole takes
 * the wheel, unless the control key is down as for any zoom. */
function turn(view, event, redraw) {
  if (document.body.scrollHeight > innerHeight && !event.ctrlKey && !event.shiftKey) return;
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : 1;
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (event.shiftKey || sideways) pan(view, (sideways ? event.deltaX : event.deltaY) * lines, 0);
  else zoom(view, Math.exp(event.deltaY * lines * 0.002), event.offsetX);
  redraw();
}

/* What the keys do, anywhere in the page or in the timeline alone. */
function keysOf(canvas, byId, state, actions) {
  const { view } = state;
  const click = (id) => () => byId(id).click();
  const select = (step) => () => actions.select(neighbour(view, state.selected, step));
  const move = (across, down) => () => pan(view, across, down);
  return [
    { key: "n", does: "show the next race", act: () => actions.nextRace(1) },
    { key: "p", does: "show the previous race", act: () => actions.nextRace(-1) },
    { key: "/", does: "search; Enter goes to the next match, Shift + Enter to the previous one",
      act: () => byId("search").focus() },
    { key: ".", does: "select the next operation of the stream", act: select(1) },
    { key: ",", does: "select the previous operation of the stream", act: select(-1) },
    { key: "Escape", does: "close the selected operation", act: () => actions.select(null) },
    { key: "t", does: "lay operations out in their order, or by host time", act: click("scale") },
    { key: "+", does: "zoom in", act: click("in") },
    { key: "-", does: "zoom out", act: click("out") },
    { key: "0", does: "show everything", act: click("all") },
    { key: "?", does: "show the keys", act: click("help") },
    { key: "ArrowLeft", name: "←", within: canvas, does: "in the timeline: move left",
      act: move(-80, 0) },
    { key: "ArrowRight", name: "→", within: canvas, does: "move right", act: move(80, 0) },
    { key: "ArrowUp", name: "↑", within: canvas, does: "move up", act: move(0, -40) },
    { key: "ArrowDown", name: "↓", within: canvas, does: "move down", act: move(0, 40) },
  ];
}

function followKeys(canvas, byId, state, actions, redraw) {
  const keys = keysOf(canvas, byId, state, actions);
  fillKeys(byId("keys").querySelector("dl"), keys);
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (target === byId("search") || byId("keys").open) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const found = keys.find((each) => each.key === key && (each.within ?? target) === target);
    if (!found) return;
    event.preventDefault();
    found.act();
    redraw();
  });
}

if (typeof document !== "undefined") main();
