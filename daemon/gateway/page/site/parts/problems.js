// Problems of a request in words: which field of the form is wrong, and why.

// Fields of a request -> their labels in the form; a hyperparameter has its own name.
const LABELS = { training_file: "data", validation_file: "evaluation data", suffix: "name", tag: "tags" };

// {field, label, text} of the gateway's {param, message}; `field` is the last part of a path such as
// method.reinforcement.hyperparameters.temperature.
export function inWords({ param, message }) {
  const field = param?.split(".").at(-1) ?? null;
  const text = param && message.startsWith(`${param}: `) ? message.slice(param.length + 2) : message;
  return { field, label: field && (LABELS[field] ?? field.replaceAll("_", " ")), text: withoutFolders(text) };
}

// Removes the folders of uploaded files from a message: the form shows files by name, and a folder is named by the id.
function withoutFolders(text) {
  return text.replace(/[^\s'"]*\/file-[0-9a-f]{24}\//g, "");
}
