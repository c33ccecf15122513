// What a step has to know about its tensors, read in one pass over Python objects. padam_ext's
// gather.py does the same in Python, for versions of torch without DLPack's C exchange interface.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "dlpack_abi.h"

namespace padam {

namespace py = pybind11;

// What was read of several parameters: words that are the same if and only if everything that
// decides which memory a kernel would touch, and how, is the same.
class Reading {
 public:
  // Makes room for what will be read, if it is as much as the last time.
  void expect(std::size_t num_words, std::size_t num_pieces) {
    words_.reserve(num_words);
    ends_.reserve(num_pieces);
  }
  std::size_t num_words() const { return words_.size(); }
  void add(std::int64_t word) { words_.push_back(word); }
  void add(const std::int64_t* begin, std::int64_t count) {
    words_.insert(words_.end(), begin, begin + count);
  }
  // Ends the words of one parameter. One that cannot be read is never the same as another.
  void end_piece(bool readable, bool plain = false);

  bool same(const Reading& other) const {
    return readable_ && other.readable_ && words_ == other.words_;
  }
  // The words of each parameter, as bytes; None for one that could not be read.
  py::list pieces() const;
  // For each parameter a byte, 1 if it is plain, see gather.py.
  py::bytes plain() const { return plain_; }

  // Whether so many words at two places are the same.
  bool same_words(std::size_t one, std::size_t other, std::size_t count) const {
    return std::equal(words_.begin() + one, words_.begin() + one + count, words_.begin() + other);
  }

 private:
  std::vector<std::int64_t> words_;
  std::vector<std::size_t> ends_;
  std::vector<std::size_t> unreadable_;  // indices of pieces, ascending
  std::string plain_;                    // a byte for each piece
  bool readable_ = true;
};

// Reads tensors through torch.Tensor.__dlpack_c_exchange_api__ and a few methods.
class Gatherer {
 public:
  // Takes torch.Tensor, torch.nn.Parameter, and a function that is given any other kind of tensor
  // and returns the one that has its memory. Throws AttributeError where Tensor has no exchange
  // interface and std::invalid_argument for a version of it that is not known here.
  Gatherer(const py::object& tensor_class, const py::object& parameter_class, py::object unwrap);

  // For (group index, parameters) pairs: the parameters that have a gradient, the gradients, the
  // group index of each, a Reading of them all, and the gradients' addresses as bytes of int64.
  // `dtensor` is the class whose instances are read as the local tensors in them, or None.
  py::tuple gather(const py::list& selection, const py::object& dtensor);

  // A Reading of the states of parameters: of the tensors and ints under these keys, as far as
  // present.
  Reading read_states(const py::object& states, const py::list& params, const py::tuple& keys,
                      const py::object& dtensor);

 private:
  bool is_dtensor(PyObject* tensor, const py::object& dtensor) const;
  // Whether it is a torch.Tensor or a Parameter, not an instance of a subclass.
  bool is_torchs_own(PyObject* tensor) const;
  // What has the memory of a tensor that is no DTensor.
  py::object unwrapped(py::object tensor) const;

  // Of one tensor in the last pass.
  struct Seen {
    // Where its objects were: hints for prefetching, never followed.
    const void* places[3] = {};
    // How a DTensor was laid out, and the hash of that; kept, so that no other has its address.
    py::object spec;
    std::int64_t spec_hash = 0;
  };
  static void prefetch(const Seen& seen);
  struct Place {
    std::int64_t address;
    bool is_plain;  // real floating point numbers in a row, of torch's own classes
  };
  // Reads all but where it is, which it returns.
  Place read(PyObject* tensor, const py::object& dtensor, Reading& reading, Seen& seen) const;

  const DLPackExchangeAPI* api_;
  py::object tensor_class_;
  py::object parameter_class_;
  py::object unwrap_;
  py::object is_neg_;
  py::object is_conj_;
  py::str grad_;
  py::str local_tensor_;
  py::str spec_;
  std::vector<std::array<Seen, 2>> seen_;  // by parameter: it and its gradient
  std::size_t num_words_ = 0;              // of the last pass
  std::vector<Seen> states_seen_;          // dicts and tensors
  std::size_t num_state_words_ = 0;
};

}  // namespace padam
