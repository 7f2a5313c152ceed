// Numbers, durations, sizes and times as people read them.

const MINUS = "\u2212";
const NOTHING = "\u2013";

/** Up to `digits` significant digits, without noise: 0.1234, 1,234, 1.2e−7. */
function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : `${MINUS}\u221e`;
  const size = Math.abs(value);
  if (value === 0) return "0";
  const large = Math.max(1e7, 10 ** digits);
  if (Number.isInteger(value) && size < large) return value.toLocaleString("en-US").replace("-", MINUS);
  if (size < 1e-4 || size >= large) {
    const [head, tail] = value.toExponential(digits - 2).split("e");
    return `${trimmed(head)}e${Number(tail)}`.replaceAll("-", MINUS);
  }
  if (size >= 10 ** digits) return Math.round(value).toLocaleString("en-US").replace("-", MINUS);
  return trimmed(value.toPrecision(digits)).replace("-", MINUS);
}

/** Every digit that there is. */
function exact(value) {
  if (!Number.isFinite(value)) return number(value);
  return (Number.isSafeInteger(value) ? value.toLocaleString("en-US") : String(value)).replaceAll("-", MINUS);
}

/** As many digits as it takes to tell apart the numbers of a chart that goes from `low` to `high`. */
function digitsFor(low, high) {
  const needed = Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / (high - low))) + 3;
  return clamp(Number.isFinite(needed) ? needed : 4, 4, 15);
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** The label of a tick: as many decimals as the distance of the ticks asks for. */
function tickNumber(value, distance) {
  const size = Math.abs(value);
  if (size < distance * 1e-6) return "0";
  if (size >= 1e15 || distance < 1e-4) {
    const decimals = Math.max(0, Math.min(12, Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(distance) + 1e-9)));
    const [head, tail] = value.toExponential(decimals).split("e");
    return `${trimmed(head)}e${Number(tail)}`.replaceAll("-", MINUS);
  }
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit && distance >= unit / 1000 && size >= 1e4 && size < unit * 1e4) return `${trimmed((value / unit).toFixed(3))}${letter}`.replace("-", MINUS);
  }
  const decimals = Math.max(0, Math.min(12, Math.ceil(-Math.log10(distance) - 1e-9)));
  const places = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return (size < 1e5 ? value.toFixed(decimals) : value.toLocaleString("en-US", places)).replace("-", MINUS);
}

/** Large counts, short: 12.3k, 4.56M. */
function short(value) {
  if (!Number.isFinite(value)) return number(value);
  for (const [unit, letter] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= unit * (unit === 1e3 ? 10 : 1)) return `${number(value / unit, 3)}${letter}`;
  }
  return number(value, 3);
}

/** Seconds as a duration of two units: 1 h 05 min, 42.1 s, 13.2 ms. */
function duration(seconds, digits = 3) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return NOTHING;
  const size = Math.abs(seconds);
  const sign = seconds < 0 ? MINUS : "";
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${sign}${number(size * 1e6, digits)} \u00b5s`;
  if (size < 1) return `${sign}${number(size * 1e3, digits)} ms`;
  if (size < 60) return `${sign}${number(size, digits)} s`;
  const whole = Math.round(size);
  const two = (left) => String(left).padStart(2, "0");
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${sign}${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${sign}${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

/** In steps of 1024, spelled as everywhere else in Slipstream. */
function bytes(value) {
  if (!Number.isFinite(value)) return NOTHING;
  for (const [unit, name] of [[2 ** 40, "TB"], [2 ** 30, "GB"], [2 ** 20, "MB"], [2 ** 10, "KB"]]) {
    if (Math.abs(value) >= unit) return `${number(value / unit, 3)} ${name}`;
  }
  return `${number(value)} B`;
}

function share(value, digits = 3) {
  return Number.isFinite(value) ? `${number(Math.abs(value) < 0.0005 ? 0 : value * 100, digits)} %` : NOTHING;
}

const MOMENT = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const CLOCK_SECONDS = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

function moment(seconds) {
  return Number.isFinite(seconds) ? clockText(MOMENT, seconds) : NOTHING;
}

/** A time that no calendar knows stays a number of seconds. */
function clockText(clock, seconds) {
  return Math.abs(seconds) <= 8.64e12 ? clock.format(seconds * 1000) : `${number(seconds)} s`;
}

/** The value of an x axis, in words. */
function along(axis, value) {
  if (axis === "step") return `step ${number(Math.round(value * 100) / 100, 9)}`;
  return axis === "relative" ? duration(value, 4) : moment(value);
}

function counted(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}
