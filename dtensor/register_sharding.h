#pragma once

#include <string>

namespace tessera {

/// Describes how an operator that a program registered with PyTorch's dispatcher ("my::attention") may be split. Afterwards it
/// takes DTensors: its kernel runs on every rank's parts, and arguments with other placements are redistributed first. Call it
/// before the operator first gets a DTensor, in the same way on every rank. An error for a second call for one operator, and for
/// one of PyTorch's own operators.
///
/// `pattern` has one term for each tensor argument (or list of tensors) and one for each result: "bh**,bh**,bh**->bh**". A letter
/// is a dim that may be split, in the same way in all terms that have it; '*' a dim that stays whole; '~' any number of whole
/// dims; "..." any number of batch dims, aligned at the right. If the operator's Meta kernel does not give the shape of a result,
/// it is computed from the shapes of the parts.
/// `summed`: letters that may be split although a result lacks them; that result is the sum over the ranks.
/// Dims of one letter whose sizes differ, where none is 1, are not split.
/// Errors: an operator that is not defined, or that was defined with its function (a composite: no rule would be asked); a
/// pattern without "->", with other signs or another number of terms; a term with a letter twice, or with several of '~' and
/// "..."; a summed letter that the pattern lacks.
void register_sharding(const std::string& op, const std::string& pattern, const std::string& summed = "");

} // namespace tessera
