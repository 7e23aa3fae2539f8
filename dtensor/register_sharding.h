#pragma once

#include <string>

namespace tessera {

/// Says how an operator that a program registered with PyTorch's dispatcher ("my::attention") may be split. Afterwards it takes
/// DTensors: its kernel runs on every rank's parts, and arguments that lie otherwise are moved first. Call it before the operator
/// first sees a DTensor, alike on every rank; an error for a second time, or for one of PyTorch's own operators.
///
/// `pattern` has one term a tensor argument (or list of tensors) and one a result: "bh**,bh**,bh**->bh**". A letter is a dim that
/// may be split, alike in all terms that have it; '*' a dim that must be whole; '~' any number of whole dims; "..." any number of
/// batch dims, aligned at the right. Results whose shape the operator's Meta kernel does not tell take theirs from the parts.
/// `summed`: letters that may be split although a result lacks them; that result is the sum over the ranks.
/// Dims of one letter whose sizes differ, where none is 1, are not split.
/// Errors: an operator that is not defined, or that was defined with its function (a composite: no rule would be asked); a
/// pattern without "->", with other signs or another number of terms; a term with a letter twice, or with several of '~' and
/// "..."; a summed letter that the pattern lacks.
void register_sharding(const std::string& op, const std::string& pattern, const std::string& summed = "");

} // namespace tessera
