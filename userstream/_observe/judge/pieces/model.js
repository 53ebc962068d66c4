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
  const { timelines } = document;
  const rows = [];
  const ofEach = timelines.map((timeline, process) =>
    readTimeline(timeline, process, addRows(rows, timeline, timelines.length > 1)));
  const entries = timelines.length > 1 ? byTime(ofEach.flat()) : ofEach.flat();
  entries.forEach((entry, index) => { entry.index = index; });
  for (const entry of entries)
    entry.after = entry.after.map((place) => ofEach[entry.process][place].index);
  const lasted = entries.reduce((end, entry) => Math.max(end, entry.began + entry.took), 0);
  const first = timelines.length === 1 ? timelines[0].first : 0;
  return { ...document, rows, entries, first, lasted, races: readRaces(document, ofEach) };
}

/* Adds the rows of a process, and returns where each is. Threads come first: what they queue goes
 * down from them. */
function addRows(rows, { process, rows: own }, areMany) {
  if (areMany) rows.push({ kind: "process", name: process.name });
  const places = [];
  for (const kind of ["thread", "stream"]) {
    own.forEach((row, place) => {
      if (row.kind === kind) places[place] = rows.push(row) - 1;
    });
  }
  return places;
}

function readTimeline({ first, names, entries, process: { offset } }, process, places) {
  let latest = 0;
  return entries.map(([name, lane, thread, stack, began, took, flags, after, touches], place) => {
    latest = Math.max(latest, offset + began);
    return {
      process,
      number: first + place,
      name: names[name],
      nameIndex: name,
      kind: lane < 0 ? "call" : kindOf(names[name]),
      lane: lane < 0 ? -1 : places[lane],
      thread: places[thread],
      stack,
      began: offset + began,
      latest, // so that operations of a process stay in the order of the calls
      took,
      waited: Boolean(flags & 1),
      captured: Boolean(flags & 2),
      after,
      touches,
    };
  });
}

function byTime(entries) {
  return entries.sort((one, other) => one.latest - other.latest);
}

function kindOf(name) {
  const found = KINDS.find(([, pattern]) => pattern.test(name));
  return found ? found[0] : "kernel";
}

/* Races, with the places of their two operations in the timeline; null: one that is not there. */
function readRaces({ races, possible, timelines }, ofEach) {
  return [...races, ...possible].map((race) => {
    const [process] = race.processes;
    const { first } = timelines[process];
    return {
      ...race,
      ends: race.entries.map((number) => ofEach[process][number - first]?.index ?? null),
    };
  });
}

/* ---- lines ---------------------------------------------------------------------------------- */

function frameText([file, line, name]) {
  return `${file}:${line} in ${name}`;
}

function shortPlace([file, line]) {
  return `${file.slice(file.lastIndexOf("/") + 1)}:${line}`;
}

function shortFrame(frame) {
  return `${shortPlace(frame)} in ${frame[2]}`;
}

/* The frames of a stack, the innermost first, and which of them is the program's line. */
function framesOf({ stacks, frames }, stack) {
  const [shown, ...places] = stacks[stack];
  return places.map((place, at) => ({ frame: frames[place], shown: at === shown })).reverse();
}

/* The frames in runs: those that say nothing about the program are folded into one. */
function foldedFrames(model, entry) {
  const runs = [];
  for (const each of framesOf(model.timelines[entry.process], entry.stack)) {
    const owner = each.shown ? null : ownerOf(each.frame);
    if (owner && runs.at(-1)?.owner === owner) runs.at(-1).frames.push(each);
    else runs.push({ owner, frames: [each] });
  }
  return runs;
}

/* Who runs the program and comes between it and the driver: userstream, or Python itself. */
function ownerOf([file, , , whose]) {
  if (whose === 2) return "userstream";
  return /^<frozen |(^|\/)(runpy|threading)\.py$/.test(file) ? "Python" : null;
}

function lineOf(timeline, stack) {
  const found = framesOf(timeline, stack).find((each) => each.shown);
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
  const names = model.timelines.map((timeline) => timeline.names.map(has));
  const rows = model.rows.map(({ name, origin }) => has(name) || has(origin ?? ""));
  const stacks = model.timelines.map((timeline) => timeline.stacks.map((_, stack) => {
    const line = lineOf(timeline, stack);
    return line !== null && has(shortFrame(line));
  }));
  return ({ process, nameIndex, stack, lane }) =>
    names[process][nameIndex] || stacks[process][stack] || (lane >= 0 && rows[lane]);
}

/* Where a match stands among all; none of them may be selected. */
function matchText(matches, selected) {
  if (!matches) return "";
  if (!matches.length) return "nothing found";
  const total = matches.length.toLocaleString("en");
  const at = selected ? matches.indexOf(selected.index) : -1;
  const place = at < 0 ? `${total} found` : `${(at + 1).toLocaleString("en")} of ${total}`;
  return `${place}, next with Enter`;
}

/* ---- texts ---------------------------------------------------------------------------------- */

function hex(address) {
  return `0x${address.toString(16)}`;
}

function count(number, what, several = `${what}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? what : several}`;
}

/* How many nanoseconds the unit has in which a time is told, and its name. */
function unitOf(nanoseconds) {
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]];
  return units.find(([each]) => nanoseconds >= each) ?? [1, "ns"];
}

function duration(nanoseconds) {
  const [size, unit] = unitOf(nanoseconds);
  return `${Number((nanoseconds / size).toPrecision(3))} ${unit}`;
}

function bytes(size) {
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const [unit, name] = units.find(([each]) => size >= each) ?? [1, size === 1 ? "byte" : "bytes"];
  return `${Number((size / unit).toPrecision(3))} ${name}`;
}
