// The command that submits a job with the same options, for the terminal.

import { optionText } from "./format.js";

export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

// `defaults` are those of a kind, as in /v1/warmd/kinds; options with their default value are left out.
export function commandOf(kind, defaults, values) {
  const words = ["warmd", "submit", kind];
  for (const [name, value] of Object.entries(values)) {
    if (value === null || isSame(value, defaults[name])) continue;
    const flag = `--${name.replaceAll("_", "-")}`;
    if (typeof value === "boolean") words.push(value ? flag : flag.replace("--", "--no-"));
    else for (const one of [value].flat()) words.push(flag, quoted(optionText(one)));
  }
  return words.join(" ");
}

export function isSame(value, other) {
  return JSON.stringify(value) === JSON.stringify(other);
}
