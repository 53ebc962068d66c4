/* The lists beside the timeline. Whatever comes from the program is put in as text. */

function make(tag, options = {}, ...children) {
  const { onclick, ...attributes } = options;
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (onclick) element.addEventListener("click", onclick);
  element.append(...children);
  return element;
}

function fillSummary(element, model) {
  const { seconds, races, stalls, calls } = model;
  const total = Object.values(calls).reduce((sum, each) => sum + each, 0);
  const streams = model.rows.filter((row) => row.kind === "stream").length;
  const sure = races.filter((race) => !race.possible).length;
  const found = sure ? make("b", {}, count(sure, "race")) : "no race";
  element.replaceChildren(
    found,
    `, ${count(stalls.length, "stall")} · ${count(total, "driver call")} on ` +
      `${count(streams, "stream")} in ${duration(seconds * 1e9)}`,
  );
}

function fillLegend(element) {
  const kinds = [
    ["kernel", "kernel"], ["copy", "copy"], ["fill", "fill"], ["graph", "graph"],
    ["memory", "allocation"], ["signal", "values, host functions"], ["wait", "the host waits"],
    ["race", "race"],
  ];
  element.replaceChildren(
    ...kinds.map(([kind, text]) => make("span", {}, make("i", { class: kind }), text)),
  );
}

function noteText({ timeline }) {
  const { dropped, entries } = timeline;
  if (!entries.length) return "No operations were kept: observe(timeline=) says how many are.";
  if (!dropped) return "";
  return `The newest ${count(entries.length, "operation")} are shown; ` +
    `${dropped.toLocaleString("en")} older ones were dropped: observe(timeline=) keeps more.`;
}

/* ---- what was found ------------------------------------------------------------------------- */

function fillFound(element, model, chooseRace) {
  const sure = model.races.filter((race) => !race.possible);
  const possible = model.races.filter((race) => race.possible);
  const cards = (races) => races.map((race) => raceCard(race, chooseRace));
  element.replaceChildren(
    ...section("Races", cards(sure), "None was found."),
    ...section("Possible races", cards(possible)),
    ...section("Stalls", model.stalls.map(stallCard)),
    ...section("Not seen", model.not_seen.map((what) => make("p", { class: "plain" }, what))),
  );
}

function section(title, children, otherwise = "") {
  if (children.length) return [make("h2", {}, title), ...children];
  return otherwise ? [make("h2", {}, title), make("p", { class: "plain" }, otherwise)] : [];
}

function raceCard(race, chooseRace) {
  const times = race.count > 1 ? `, ${race.count.toLocaleString("en")} times` : "";
  const card = make(
    "button",
    { type: "button", class: `card race${race.possible ? " possible" : ""}` },
    make("b", {}, `${race.kind}${times}`),
    placeText(race),
    ...allocatorOf(race),
    ...sideOf("first", race.first),
    ...sideOf("second", race.second),
    make("span", { class: "advice" }, race.advice),
  );
  if (race.ends.every((end) => end === null))
    card.append(make("span", { class: "gone" }, "Neither is in the timeline any more."));
  card.addEventListener("click", () => chooseRace(race));
  race.card = card;
  return card;
}

/* Of what a kernel touches only the address is known. */
function placeText({ address, memory, nbytes }) {
  return `${nbytes > 1 ? `${bytes(nbytes)} of ` : ""}${memory} memory at ${hex(address)}`;
}

function allocatorOf({ framework, allocated_at: line }) {
  if (!framework) return [];
  return [
    make("span", { class: "side" }, `allocated by ${framework}`),
    make("span", { class: "where" }, whereText(line)),
  ];
}

function sideOf(which, operation) {
  return [
    make("span", { class: "side" },
      `${which}: ${operation.name} (${operation.access}) on ${operation.stream}`),
    make("span", { class: "where" }, whereText(operation.line)),
  ];
}

function stallCard(stall) {
  const times = stall.count > 1 ? `, ${count(stall.count, "time")}` : "";
  return make(
    "div",
    { class: "card" },
    make("b", {}, `${duration(stall.seconds * 1e9)} in ${stall.name}${times}`),
    make("span", { class: "where" }, whereText(stall.line)),
  );
}

function whereText(line) {
  return line ? frameText(line) : "no line of Python";
}

const TOUCHES = ["reads", "writes", "reads or writes"]; // as the last number of a touch says

/* ---- one operation -------------------------------------------------------------------------- */

function fillDetail(element, model, entry, actions) {
  element.hidden = entry === null;
  if (entry === null) return;
  const facts = [
    ["number", (model.timeline.first + entry.index).toLocaleString("en")],
    ["stream", entry.lane < 0 ? "the host" : model.rows[entry.lane].name],
    ["thread", model.rows[entry.thread].name],
    ["queued", `at ${duration(entry.began)}, took ${duration(entry.took)}`],
    ...(entry.captured ? [["", "captured: it runs when its graph is launched"]] : []),
    ...(entry.waited ? [["", "the host waited"]] : []),
    ...entry.touches.map((touch) => [TOUCHES[touch[2]], touchLink(touch, actions)]),
    ...entry.after.map((index) => ["after", entryLink(model, index, actions)]),
  ];
  element.replaceChildren(
    button("close", "×", () => actions.select(null)),
    make("h2", {}, entry.name),
    make("dl", {}, ...facts.flatMap(factOf)),
    ...section("Stack", [stackList(model, entry)]),
  );
}

function factOf([name, value]) {
  return [make("dt", {}, name), make("dd", {}, value)];
}

function button(kind, text, onclick) {
  return make("button", { type: "button", class: kind, onclick }, text);
}

function touchLink([start, size], actions) {
  const link = button("link", hex(start), () => actions.search(hex(start)));
  return make("span", {}, link, size > 1 ? ` ${bytes(size)}` : "");
}

function entryLink(model, index, actions) {
  const entry = model.entries[index];
  const text = `${entry.name} (${(model.timeline.first + index).toLocaleString("en")})`;
  return button("link", text, () => actions.select(entry));
}

function stackList(model, entry) {
  const frames = framesOf(model, entry.stack);
  const lines = frames.map(({ frame, shown }) =>
    make("li", shown ? { class: "line" } : {}, frameText(frame)));
  return make("ol", {}, ...(lines.length ? lines : [make("li", {}, "no line of Python")]));
}

function fillTip(element, model, entry, x, y) {
  element.hidden = entry === null;
  if (entry === null) return;
  const line = lineOf(model, entry.stack);
  element.replaceChildren(
    make("b", {}, entry.name),
    make("span", {}, entry.lane < 0 ? model.rows[entry.thread].name : model.rows[entry.lane].name),
    ...(line ? [make("span", {}, shortFrame(line))] : []),
  );
  const room = element.parentElement.getBoundingClientRect();
  const left = Math.min(x + 14, room.width - element.offsetWidth - 4);
  const below = y + 16 + element.offsetHeight < room.height;
  element.style.left = `${Math.max(4, left)}px`;
  element.style.top = `${below ? y + 16 : Math.max(0, y - element.offsetHeight - 8)}px`;
}
