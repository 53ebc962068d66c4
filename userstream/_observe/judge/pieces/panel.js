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
  const { seconds, races, stalls, calls, streams } = model;
  const total = Object.values(calls).reduce((sum, each) => sum + each, 0);
  const many = model.timelines.length;
  const processes = many > 1 ? ` of ${count(many, "process", "processes")}` : "";
  const sure = races.filter((race) => !race.possible).length;
  const found = sure ? make("b", {}, count(sure, "race")) : "no race";
  element.replaceChildren(
    found,
    `, ${count(stalls.length, "stall")} · ${count(total, "driver call")} on ` +
      `${count(streams, "stream")}${processes} in ${duration(seconds * 1e9)}`,
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

function noteText({ timelines, entries }) {
  const dropped = timelines.reduce((sum, timeline) => sum + timeline.dropped, 0);
  if (!entries.length) return "No operations were kept: observe(timeline=) says how many are.";
  if (!dropped) return "";
  return `The newest ${count(entries.length, "operation")} are shown; ` +
    `${dropped.toLocaleString("en")} older ones were dropped: observe(timeline=) keeps more.`;
}

/* ---- what was found ------------------------------------------------------------------------- */

function fillFound(element, model, actions) {
  const sure = model.races.filter((race) => !race.possible);
  const possible = model.races.filter((race) => race.possible);
  const cards = (races) => races.map((race) => raceCard(model, race, actions));
  element.replaceChildren(
    ...section("Races", cards(sure), "None was found."),
    ...section("Possible races", cards(possible)),
    ...section("Streams that did not go on",
      model.hangs.map((text) => make("pre", { class: "plain" }, text))),
    ...section("Streams to be avoided", model.wrong_streams.map((each) => wrongCard(model, each))),
    ...section("Stalls", model.stalls.map((stall) => stallCard(model, stall))),
    ...section("Not seen", model.not_seen.map((what) => make("p", { class: "plain" }, what))),
  );
}

function section(title, children, otherwise = "") {
  if (children.length) return [make("h2", {}, title), ...children];
  return otherwise ? [make("h2", {}, title), make("p", { class: "plain" }, otherwise)] : [];
}

/* Its title is a button for the keyboard; a pointer may hit the card anywhere else as well. */
function raceCard(model, race, actions) {
  const times = race.count > 1 ? `, ${race.count.toLocaleString("en")} times` : "";
  const title = button("title", `${race.kind}${times}`, () => actions.chooseRace(race));
  const card = make(
    "article",
    { class: `card race${race.possible ? " possible" : ""}` },
    make("h3", {}, title),
    ...processesOf(model, race),
    make("span", {}, placeText(race)),
    ...allocatorOf(race),
    ...sideOf(model, "first", race.first, race.ends[0], actions),
    ...sideOf(model, "second", race.second, race.ends[1], actions),
    ...(race.trial ? [make("span", { class: "reason" }, race.trial)] : []),
    ...(race.reason ? [make("span", { class: "reason" }, `possible: ${race.reason}`)] : []),
    make("span", { class: "advice" }, race.advice),
    ...(race.edits ?? []).map(editOf),
  );
  if (race.ends.every((end) => end === null))
    card.append(make("span", { class: "gone" }, "Neither is in the timeline any more."));
  card.addEventListener("click", ({ target }) => {
    const isText = !getSelection().isCollapsed; // somebody copies a line
    if (!target.closest("button") && !isText) actions.chooseRace(race);
  });
  race.card = card;
  return card;
}

function processesOf(model, { processes }) {
  if (model.timelines.length < 2) return [];
  const names = processes.map((process) => model.timelines[process].process.name);
  const many = `${names.length} of ${model.timelines.length} processes`;
  return [make("span", { class: "side" }, names.length > 6 ? many : names.join(", "))];
}

/* Lines of code to put in the place of some, or before one. */
function editOf({ file, line, end, code }) {
  const where = end > line ? `instead of ${file}:${line}` : `before ${file}:${line}`;
  return make("span", { class: "edit" },
    make("span", { class: "where" }, where), make("code", {}, code));
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

function sideOf(model, which, operation, end, actions) {
  const { name, stream, origin, line, captured, since } = operation;
  const isHost = name.endsWith(" of the host"); // "a write of the host" is no call
  const who = isHost ? "the host" : name;
  const shown = end === null
    ? who : button("link", who, () => actions.select(model.entries[end]));
  const on = isHost ? "" : stream === "the host" ? " by the host" : ` on ${stream}`;
  return [
    make("span", { class: "side" }, `${which}: `, shown, ` ${doingText(operation)}${on}`),
    ...(origin ? [make("span", { class: "origin" }, origin)] : []),
    make("span", { class: "where" },
      since ? `between ${frameText(since)} and ${whereText(line)}` : whereText(line)),
    ...(captured ? [make("span", { class: "where" }, `captured at ${whereText(captured)}`)] : []),
  ];
}

/* What an operation does with the memory, and how that is known. */
function doingText({ access, known }) {
  if (known === "assumed") return `may ${access} (assumed)`;
  return known === "exact" ? `${access}s` : `${access}s (${known})`;
}

function stallCard(model, stall) {
  const times = stall.count > 1 ? `, ${count(stall.count, "time")}` : "";
  return make(
    "div",
    { class: "card" },
    make("h3", {}, `${duration(stall.seconds * 1e9)} in ${stall.name}${times}`),
    ...processesOf(model, stall),
    make("span", { class: "where" }, whereText(stall.line)),
  );
}

function wrongCard(model, wrong) {
  const times = wrong.count > 1 ? `, ${count(wrong.count, "time")}` : "";
  return make(
    "div",
    { class: "card" },
    make("h3", {}, `${wrong.name} on ${wrong.stream}${times}`),
    ...processesOf(model, wrong),
    make("span", { class: "where" }, whereText(wrong.line)),
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
  const { scrollTop } = element.nextElementSibling;
  const facts = [
    ["number", entry.number.toLocaleString("en")],
    ...(model.timelines.length > 1
      ? [["process", model.timelines[entry.process].process.name]] : []),
    ["stream", entry.lane < 0 ? "the host" : rowText(model.rows[entry.lane])],
    ["thread", model.rows[entry.thread].name],
    ["queued", `at ${duration(entry.began)}, took ${duration(entry.took)}`],
    ...(entry.captured ? [["", "captured: it runs when its graph is launched"]] : []),
    ...(entry.waited ? [["", "the host waited"]] : []),
    ...entry.touches.map((touch) => [TOUCHES[touch[2]], touchLink(touch, actions)]),
    ...entry.after.map((index) => ["after", entryLink(model, index, actions)]),
  ];
  element.replaceChildren(
    make("button", { type: "button", class: "close", "aria-label": "Close",
      onclick: () => actions.select(null) }, "×"),
    make("h2", {}, entry.name),
    make("dl", {}, ...facts.flatMap(factOf)),
    make("h3", {}, "Stack"),
    stackList(model, entry),
  );
  element.scrollTop = 0;
  element.nextElementSibling.scrollTop = scrollTop;
}

function rowText({ name, origin, handle }) {
  return [name, origin, handle && hex(handle)].filter(Boolean).join(", ");
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
  const text = `${entry.name} (${entry.number.toLocaleString("en")})`;
  return button("link", text, () => actions.select(entry));
}

function stackList(model, entry) {
  const items = foldedFrames(model, entry).map(({ owner, frames }) =>
    owner ? foldedItem(owner, frames) : frameItem(frames[0]));
  return make("ol", {}, ...(items.length ? items : [make("li", {}, "no line of Python")]));
}

function frameItem({ frame, shown }) {
  return make("li", shown ? { class: "line" } : {}, frameText(frame));
}

function foldedItem(owner, frames) {
  return make("li", {}, make("details", {},
    make("summary", {}, `${count(frames.length, "frame")} of ${owner}`),
    make("ol", {}, ...frames.map(frameItem))));
}

/* ---- keys ----------------------------------------------------------------------------------- */

function fillKeys(element, keys) {
  element.replaceChildren(...keys.flatMap(({ key, name, does }) => [
    make("dt", {}, make("kbd", {}, name ?? key)), make("dd", {}, does),
  ]));
}

function fillTip(element, model, entry, x, y) {
  element.hidden = entry === null;
  if (entry === null) return;
  const line = lineOf(model.timelines[entry.process], entry.stack);
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
