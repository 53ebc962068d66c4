"use strict";

/* What was observed, as the page works with it. Nothing here knows of a screen. */

const KINDS = [
  ["copy", /^cuMemcpy/],
  ["fill", /^cuMemset/],
  ["graph", /^cuGraphLaunch/],
  ["memory", /^cuMem/],
  ["signal", /^cu(Stream|LaunchHostFunc)/],
];

function readModel(document) {
  const timeline = document.timeline;
  const rows = sortedRows(timeline.rows);
  const entries = timeline.entries.map((row, index) => readEntry(row, index, timeline, rows));
  const lasted = entries.reduce((end, entry) => Math.max(end, entry.began + entry.took), 0);
  return { ...document, timeline, rows, entries, lasted, races: readRaces(document) };
}

/* Threads come first: what they queue goes down from them. */
function sortedRows(rows) {
  const numbered = rows.map((row, place) => ({ ...row, place }));
  const sorted = [
    ...numbered.filter((row) => row.kind === "thread"),
    ...numbered.filter((row) => row.kind === "stream"),
  ];
  sorted.forEach((row, at) => { numbered[row.place].at = at; });
  return Object.assign(sorted, { at: (place) => (place < 0 ? -1 : numbered[place].at) });
}

function readEntry(row, index, timeline, rows) {
  const [name, lane, thread, stack, began, took, flags, after, touches] = row;
  return {
    index,
    name: timeline.names[name],
    nameIndex: name,
    kind: lane < 0 ? "call" : kindOf(timeline.names[name]),
    lane: rows.at(lane),
    thread: rows.at(thread),
    stack,
    began,
    took,
    waited: Boolean(flags & 1),
    captured: Boolean(flags & 2),
    after,
    touches,
  };
}

function kindOf(name) {
  const found = KINDS.find(([, pattern]) => pattern.test(name));
  return found ? found[0] : "kernel";
}

/* Races, with the places of their two operations in the timeline; null: one that is not there. */
function readRaces(document) {
  const { first, entries } = document.timeline;
  const place = (number) => {
    const at = number - first;
    return number >= 0 && at >= 0 && at < entries.length ? at : null;
  };
  return [...document.races, ...document.possible].map((race) => ({
    ...race,
    ends: race.entries.map(place),
  }));
}

/* ---- lines ---------------------------------------------------------------------------------- */

function frameText([file, line, name]) {
  return `${file}:${line} in ${name}`;
}

function shortFrame([file, line, name]) {
  return `${file.slice(file.lastIndexOf("/") + 1)}:${line} in ${name}`;
}

/* The frames of a stack, the innermost first, and which of them is the program's line. */
function framesOf(model, stack) {
  const [shown, ...places] = model.timeline.stacks[stack];
  const frames = places.map((place, at) => ({
    frame: model.timeline.frames[place],
    shown: at === shown,
  }));
  return frames.reverse();
}

function lineOf(model, stack) {
  const found = framesOf(model, stack).find((each) => each.shown);
  return found ? found.frame : null;
}

/* ---- search --------------------------------------------------------------------------------- */

/* Tells which entries a query means: an address that they touch, or a text in what they are. */
function search(model, query) {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return null;
  const address = addressOf(wanted);
  const hasText = textMatcher(model, wanted);
  const matches = (entry) =>
    hasText(entry) || (address !== null && touchesAddress(entry, address));
  return model.entries.filter(matches).map((entry) => entry.index);
}

function addressOf(text) {
  return /^0x[0-9a-f]+$/.test(text) ? Number.parseInt(text, 16) : null;
}

function touchesAddress(entry, address) {
  return entry.touches.some(([start, size]) => start <= address && address < start + size);
}

/* Names, lines and rows are few: each is looked at once. */
function textMatcher(model, wanted) {
  const has = (text) => text.toLowerCase().includes(wanted);
  const names = model.timeline.names.map(has);
  const rows = model.rows.map((row) => has(row.name));
  const stacks = model.timeline.stacks.map((_, stack) => {
    const line = lineOf(model, stack);
    return line !== null && has(shortFrame(line));
  });
  return (entry) =>
    names[entry.nameIndex] || stacks[entry.stack] || (entry.lane >= 0 && rows[entry.lane]);
}

/* ---- texts ---------------------------------------------------------------------------------- */

function hex(address) {
  return `0x${address.toString(16)}`;
}

function count(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

function duration(nanoseconds) {
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]];
  const [size, unit] = units.find(([each]) => nanoseconds >= each) ?? [1, "ns"];
  return `${Number((nanoseconds / size).toPrecision(3))} ${unit}`;
}

function bytes(size) {
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const [unit, name] = units.find(([each]) => size >= each) ?? [1, size === 1 ? "byte" : "bytes"];
  return `${Number((size / unit).toPrecision(3))} ${name}`;
}
