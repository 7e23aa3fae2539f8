#pragma once

namespace examples {

/// From now on SIGTERM does not end this process: a training saves what it has, and ends by itself.
void note_termination();
/// Whether one has come since.
bool is_terminated();

} // namespace examples
