#pragma once

// Internal: what marks a parameter that is stepped in its backward.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::internal {

/// Marks `parameter`, which errors call `name`, until `unmark`. `landed` is called whenever a gradient of it has come to
/// `grad()`, after a post-accumulate hook that the program has set before. An error where it is marked already.
void mark_stepped_in_backward(const at::Tensor& parameter, std::string name, std::function<void(const at::Tensor&)> landed);
void unmark_stepped_in_backward(const at::Tensor& parameter);

/// Whether any parameter is marked, by a count.
bool is_any_stepped_in_backward();
/// Whether `parameter` is marked.
bool is_stepped_in_backward(const at::Tensor& parameter);

/// An error where one of `parameters` is marked: nothing that needs the gradients of all parameters together finds them after
/// the backward. `what` begins it, and says what needs them.
void check_not_stepped_in_backward(const std::vector<at::Tensor>& parameters, const char* what);

} // namespace tessera::internal
